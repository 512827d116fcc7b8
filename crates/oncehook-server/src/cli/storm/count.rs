//! How many effects have happened: asked of a command, a URL or a database.
//!
//! Where the question holds `{key}` it is asked for every event, and the answer is exact. Without it there is one number for
//! all, and what happened twice can hide what was lost.
//!
//! Does not: change anything. Databases are opened for reading, as far as they can be told so.

use std::time::Duration;

use anyhow::{Context as _, bail};
use reqwest::Url;

use super::super::client::{cause, http_client, read_answer};
use super::super::text;

/// The longest that one answer may take.
const WAIT: Duration = Duration::from_secs(20);

/// Where an event's id is put.
const KEY: &str = "{key}";

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = true)]
pub(super) struct CountArgs {
    /// A shell command that prints how many effects there are; {key} in it is the id of an event
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["count_url", "count_sql"])]
    count_cmd: Option<String>,
    /// A URL that answers with that number, as text or as {"count": N}; {key} in it is the id of an event
    #[arg(long, value_name = "URL", conflicts_with = "count_sql")]
    count_url: Option<String>,
    /// A SELECT of that number, asked of --database; {key} in it is the id of an event
    #[arg(long, value_name = "SQL", requires = "database")]
    count_sql: Option<String>,
    /// Where to ask it: sqlite://PATH, postgres://… or mysql://…
    #[arg(long, value_name = "URL", requires = "count_sql")]
    database: Option<String>,
}

/// Asks for the number of effects.
pub(super) struct Counter {
    question: Question,
}

enum Question {
    Command(String),
    Url { template: String, http: reqwest::Client },
    Sqlite { statement: String, path: String },
    Postgres { statement: String, url: String },
    MySql { statement: String, url: String },
}

impl Counter {
    pub(super) fn new(args: CountArgs) -> anyhow::Result<Self> {
        let question = match args {
            CountArgs { count_cmd: Some(command), .. } => Question::Command(command),
            CountArgs { count_url: Some(template), .. } => {
                let url = Url::parse(&template.replace(KEY, "key")).context("--count-url is not a URL")?;
                Question::Url { template, http: http_client(url.scheme() == "https", 1)? }
            }
            CountArgs { count_sql: Some(statement), database: Some(database), .. } => sql(statement, &database)?,
            _ => bail!("give --count-cmd, --count-url, or --count-sql with --database"),
        };
        Ok(Self { question })
    }

    /// Whether it can be asked about a single event.
    pub(super) fn is_exact(&self) -> bool {
        let text = match &self.question {
            Question::Command(text) => text,
            Question::Url { template, .. } => template,
            Question::Sqlite { statement, .. }
            | Question::Postgres { statement, .. }
            | Question::MySql { statement, .. } => statement,
        };
        text.contains(KEY)
    }

    /// The number of effects: of one event, or of all.
    pub(super) async fn count(&self, key: &str) -> anyhow::Result<i64> {
        let asked = async {
            match &self.question {
                Question::Command(command) => of_command(&command.replace(KEY, key)).await,
                Question::Url { template, http } => of_url(http, &template.replace(KEY, key)).await,
                Question::Sqlite { statement, path } => of_sqlite(statement.replace(KEY, key), path.clone()).await,
                Question::Postgres { statement, url } => of_postgres(&statement.replace(KEY, key), url).await,
                Question::MySql { statement, url } => of_mysql(&statement.replace(KEY, key), url).await,
            }
        };
        tokio::time::timeout(WAIT, asked)
            .await
            .with_context(|| format!("counting effects took longer than {} s", WAIT.as_secs()))?
            .context("count the effects")
    }
}

fn sql(statement: String, database: &str) -> anyhow::Result<Question> {
    match database.split_once("://") {
        Some(("sqlite", path)) => Ok(Question::Sqlite { statement, path: path.to_owned() }),
        Some(("postgres" | "postgresql", _)) => Ok(Question::Postgres { statement, url: database.to_owned() }),
        Some(("mysql" | "mariadb", rest)) => Ok(Question::MySql { statement, url: format!("mysql://{rest}") }),
        // The URL may hold a password.
        _ => bail!("--database begins with sqlite://, postgres:// or mysql://; ask others with --count-cmd"),
    }
}

async fn of_command(command: &str) -> anyhow::Result<i64> {
    let command = command.to_owned();
    let output = tokio::task::spawn_blocking(move || {
        std::process::Command::new("sh").args(["-c", &command]).stdin(std::process::Stdio::null()).output()
    })
    .await?
    .context("run --count-cmd")?;
    if !output.status.success() {
        bail!(
            "--count-cmd failed: {}: {}",
            output.status,
            text::shown(String::from_utf8_lossy(&output.stderr).trim(), 300)
        );
    }
    number(&output.stdout)
}

async fn of_url(http: &reqwest::Client, url: &str) -> anyhow::Result<i64> {
    let sent = http.get(url).send().await;
    let response = sent.map_err(|error| anyhow::anyhow!("nobody answers --count-url: {}", cause(&error)))?;
    let status = response.status();
    let (body, _) = read_answer(response, 64 << 10).await?;
    if !status.is_success() {
        bail!("--count-url answered {status}");
    }
    number(&body)
}

async fn of_sqlite(statement: String, path: String) -> anyhow::Result<i64> {
    tokio::task::spawn_blocking(move || {
        let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
        let connection = rusqlite::Connection::open_with_flags(&path, flags).with_context(|| format!("open {path}"))?;
        connection.busy_timeout(WAIT / 2)?;
        connection.query_row(&statement, [], |row| row.get(0)).context("ask --count-sql")
    })
    .await?
}

async fn of_postgres(statement: &str, url: &str) -> anyhow::Result<i64> {
    let connected = tokio_postgres::connect(url, tokio_postgres::NoTls).await;
    let (client, connection) = connected.context("connect to --database")?;
    let connection = tokio::spawn(connection);
    let rows = client.simple_query(statement).await.context("ask --count-sql");
    drop(client);
    // It ends with its client; what went wrong with it has shown in the query.
    let _ = connection.await;
    let first = rows?.into_iter().find_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    number(first.context("--count-sql gave no row")?.as_bytes())
}

async fn of_mysql(statement: &str, url: &str) -> anyhow::Result<i64> {
    use mysql_async::prelude::Queryable as _;
    // Its error would repeat the URL, which may hold a password.
    let opts = mysql_async::Opts::from_url(url).map_err(|_| anyhow::anyhow!("--database is not a MySQL URL"))?;
    let mut connection = mysql_async::Conn::new(opts).await.context("connect to --database")?;
    let first: Option<i64> = connection.query_first(statement).await.context("ask --count-sql")?;
    // The answer is here; how the goodbye goes changes nothing.
    let _ = connection.disconnect().await;
    first.context("--count-sql gave no row")
}

/// A whole number, alone or as `{"count": N}`.
fn number(answer: &[u8]) -> anyhow::Result<i64> {
    let said = String::from_utf8_lossy(answer);
    let said = said.trim();
    if let Ok(number) = said.parse() {
        return Ok(number);
    }
    let json: Option<serde_json::Value> = serde_json::from_str(said).ok();
    json.and_then(|json| json.get("count")?.as_i64())
        .with_context(|| format!("this is not a number: {:?}", text::shown(said, 80)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_alone_or_in_json() {
        assert_eq!(number(b" 12\n").unwrap(), 12);
        assert_eq!(number(br#"{"count": 3}"#).unwrap(), 3);
        for bad in ["", "12 effects", "1.5", r#"{"n":1}"#] {
            assert!(number(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_database_is_named_by_its_url_and_a_password_is_not_repeated() {
        assert!(
            matches!(sql("SELECT 1".into(), "sqlite://a/b.db").unwrap(), Question::Sqlite { path, .. } if path == "a/b.db")
        );
        assert!(sql("SELECT 1".into(), "postgres://u@h/d").is_ok());
        let Err(error) = sql("SELECT 1".into(), "oracle://me:hunter2@h/d") else { panic!("it was taken") };
        assert!(!format!("{error:#}").contains("hunter2"));
    }
}
