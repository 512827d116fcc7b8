//! A real MariaDB for tests: the installed server (Debian's `mariadb-server`; `make services` installs it) on a data
//! directory, port and socket of its own, with its log synced at every commit. Where the environment variable
//! `ONCEHOOK_TEST_MYSQL` names a folder that `tools/mysql.sh` made, the server is Oracle's MySQL from there
//! (`make test-mysql`).
//!
//! Promises: the server ends and its directory goes when the [`Server`] is dropped, and also when the process ends in any
//! other way: a small shell holds it, and ends it once the pipe from this process is closed. A missing installation is a
//! panic, never a skipped test.
//!
//! Does not: mock anything, read a configuration of the machine, or share data between databases. [`Server::shared`] is one
//! server per process; every test makes a database of its own on it.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Runs the server, does what it is told line by line, and tidies up when nobody can tell it anything any more.
const KEEPER: &str = r#"
# Whoever interrupts us interrupts the one who tells, too: nothing more will be said, and we tidy up.
trap : INT TERM HUP PIPE
server_program=$1; data=$2; port=$3; user=$4; shift 4
start() {
  "$server_program" --no-defaults --user="$user" --datadir="$data/db" --socket="$data/socket" --pid-file="$data/pid" \
    --tmpdir="$data/tmp" --port="$port" --bind-address=127.0.0.1 "$@" >>"$data/log" 2>&1 & server=$!
}
end() { kill -CONT "$server" 2>/dev/null; kill "-$1" "$server" 2>/dev/null; wait "$server" 2>/dev/null; }
# Of its own: a server that starts removes what it takes for its leftovers there.
mkdir "$data/tmp"
install >"$data/log" 2>&1 || { cat "$data/log" >&2; rm -rf "$data"; exit 1; }
start "$@"
echo started
while read -r word; do
  case $word in
    start) start "$@" ;;
    stop) end TERM ;;
    crash) end KILL ;;
    freeze) kill -STOP "$server" ;;
    thaw) kill -CONT "$server" ;;
  esac
  echo "$word"
done
end KILL
rm -rf "$data"
"#;

/// How MariaDB makes an empty data directory.
const INSTALL_MARIADB: &str = r#"
install() {
  mariadb-install-db --no-defaults --user="$user" --datadir="$data/db" --auth-root-authentication-method=normal \
    --skip-test-db --innodb-log-file-size=8M --tmpdir="$data/tmp"
}"#;

/// How MySQL does. Its only user may come through the socket; tests come through the port, too.
const INSTALL_MYSQL: &str = r#"
install() {
  echo "CREATE USER root@'127.0.0.1'; GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;" >"$data/first.sql"
  "$server_program" --no-defaults --initialize-insecure --user="$user" --datadir="$data/db" --tmpdir="$data/tmp" \
    --init-file="$data/first.sql"
}"#;

/// The longest that a server may take to start.
const START: Duration = Duration::from_secs(120);

/// A running server.
pub struct Server {
    port: u16,
    data: PathBuf,
    keeper: Mutex<Keeper>,
    databases: AtomicU32,
}

struct Keeper {
    process: Child,
    words: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Server {
    /// The server that all tests of this process share.
    #[must_use]
    pub fn shared() -> &'static Self {
        static SERVER: OnceLock<Server> = OnceLock::new();
        SERVER.get_or_init(|| Self::start(&[]))
    }

    /// Starts a server with further settings (`--name=value`).
    #[must_use]
    pub fn start(settings: &[&str]) -> Self {
        let Installation { program, install, log_size } = Installation::find();
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let data = tempfile::Builder::new().prefix("oncehook-my-").tempdir().unwrap().keep();
        let usual = [
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-buffer-pool-size=256M",
            log_size,
            "--max-connections=500",
            "--skip-name-resolve",
        ];
        let mut command = Command::new("sh");
        command
            .args(["-c", &[install, KEEPER].concat(), "keeper"])
            .arg(program)
            .arg(&data)
            .arg(port.to_string())
            .arg(user());
        command.args(usual.iter().chain(settings));
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let words = process.stdin.take();
        let mut answers = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "started", "no data directory could be made");
        let keeper = Mutex::new(Keeper { process, words, answers });
        let server = Self { port, data, keeper, databases: AtomicU32::new(0) };
        server.wait();
        server
    }

    /// A new, empty database.
    #[must_use]
    pub fn database(&self) -> Database<'_> {
        let number = self.databases.fetch_add(1, Ordering::Relaxed);
        self.make(format!("test_{number}"))
    }

    /// The database that belongs to a directory. The same directory gives the same database.
    #[must_use]
    pub fn database_of(&self, directory: &Path) -> Database<'_> {
        let digest = oncehook_verify::digest(directory.as_os_str().as_encoded_bytes());
        self.make(format!("of_{}", hex::encode(&digest[..10])))
    }

    fn make(&self, name: String) -> Database<'_> {
        self.database_named("").query(&format!("CREATE DATABASE IF NOT EXISTS {name}"));
        self.database_named(&name)
    }

    fn database_named(&self, name: &str) -> Database<'_> {
        Database { server: self, name: name.to_owned() }
    }

    /// The port on the loopback address.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The server's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        let text = std::fs::read_to_string(self.data.join("pid")).unwrap();
        text.trim().parse().unwrap()
    }

    /// Stops the server in good order: open transactions are undone, connections end.
    pub fn stop(&self) {
        self.tell("stop");
    }

    /// Ends the server as a crash would.
    pub fn crash(&self) {
        self.tell("crash");
    }

    /// Stops the server's clock, so to say: it answers nobody until it is thawed.
    pub fn freeze(&self) {
        self.tell("freeze");
    }

    /// Lets a frozen server go on.
    pub fn thaw(&self) {
        self.tell("thaw");
    }

    /// Starts the server again on the same data and port.
    pub fn restart(&self) {
        self.tell("start");
        self.wait();
    }

    fn keeper(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, word: &str) {
        let mut keeper = self.keeper();
        let words = keeper.words.as_mut().unwrap();
        writeln!(words, "{word}").unwrap();
        let mut answer = String::new();
        keeper.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer.trim(), word);
    }

    /// Waits until it takes connections.
    fn wait(&self) {
        let begun = Instant::now();
        while self.database_named("").try_query("SELECT 1").is_err() {
            let log = || std::fs::read_to_string(self.data.join("log")).unwrap_or_default();
            assert!(begun.elapsed() < START, "the server did not start: {}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut keeper = self.keeper();
        keeper.words = None;
        // The keeper ends the server, however it goes; there is nobody left to tell.
        let _ = keeper.process.wait();
    }
}

/// A database on a server.
#[derive(Clone)]
pub struct Database<'s> {
    server: &'s Server,
    name: String,
}

impl Database<'_> {
    /// How to reach it.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(self.server.port)
    }

    /// How to reach it through another port (a proxy's).
    #[must_use]
    pub fn url_at(&self, port: u16) -> String {
        format!("mysql://root@127.0.0.1:{port}/{}", self.name)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs statements and returns the rows of the last one, a line each, columns parted by `|`; null is an empty column. An
    /// error is a panic.
    pub fn query(&self, sql: &str) -> String {
        self.try_query(sql).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// The same, with the error's text.
    pub fn try_query(&self, sql: &str) -> Result<String, String> {
        let ran = Command::new("mariadb")
            .args(["--no-defaults", "--batch", "--raw", "--skip-column-names", "--default-character-set=utf8mb4"])
            .arg("--socket")
            .arg(self.server.data.join("socket"))
            .args(["--user=root", &format!("--execute={sql}"), &self.name])
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\n').to_owned();
        if !ran.status.success() {
            return Err(text(&ran.stderr));
        }
        let column = |column: &str| if column == "NULL" { String::new() } else { column.to_owned() };
        let line = |line: &str| line.split('\t').map(column).collect::<Vec<_>>().join("|");
        Ok(text(&ran.stdout).lines().map(line).collect::<Vec<_>>().join("\n"))
    }
}

/// The folder of Oracle's MySQL, if the tests run on that.
#[expect(clippy::disallowed_methods, reason = "which server is tested is no configuration of the gateway")]
fn mysql_folder() -> Option<PathBuf> {
    std::env::var_os("ONCEHOOK_TEST_MYSQL").filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// Whether the tests run on MariaDB, and not on Oracle's MySQL. For statements of a test that one of them does not know.
#[must_use]
pub fn is_mariadb() -> bool {
    mysql_folder().is_none()
}

/// The statements of a handler that inserts a row and returns columns of it. MariaDB does both with one statement; MySQL has
/// no `RETURNING`, and needs a second one. `inserted` names the new row: `orders WHERE id = LAST_INSERT_ID()`.
#[must_use]
pub fn returning(insert: &str, columns: &str, inserted: &str) -> Vec<String> {
    if is_mariadb() {
        vec![format!("{insert} RETURNING {columns}")]
    } else {
        vec![insert.to_owned(), format!("SELECT {columns} FROM {inserted}")]
    }
}

/// A server's program, and what MariaDB and MySQL want to be asked in different words.
struct Installation {
    program: PathBuf,
    /// Shell: makes the empty data directory.
    install: &'static str,
    log_size: &'static str,
}

impl Installation {
    fn find() -> Self {
        if let Some(folder) = mysql_folder() {
            let program = folder.join("bin/mysqld");
            assert!(program.exists(), "{} is missing: run `make mysql` first", program.display());
            return Self { program, install: INSTALL_MYSQL, log_size: "--innodb-redo-log-capacity=256M" };
        }
        let places = ["/usr/sbin/mariadbd", "/usr/bin/mariadbd", "/usr/local/bin/mariadbd"];
        let found = places.into_iter().map(PathBuf::from).find(|place| place.exists());
        let program = found.expect("MariaDB is not installed: run `make services` first");
        Self { program, install: INSTALL_MARIADB, log_size: "--innodb-log-file-size=256M" }
    }
}

/// Whom the server runs as: itself, which it needs to be told if that is root.
fn user() -> String {
    let asked = Command::new("id").arg("-un").output().unwrap();
    String::from_utf8(asked.stdout).unwrap().trim().to_owned()
}
