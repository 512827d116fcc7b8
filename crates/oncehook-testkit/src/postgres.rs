//! A real PostgreSQL for tests: the installed server (Debian's `postgresql`; `make services` installs it) on a data
//! directory and port of its own, with `fsync` on.
//!
//! Promises: the server ends and its directory goes when the [`Server`] is dropped, and also when the process ends in any
//! other way: a small shell holds it, and ends it once the pipe from this process is closed. A missing installation is a
//! panic, never a skipped test.
//!
//! Does not: mock anything, or share data between databases. [`Server::shared`] is one server per process; every test
//! makes a database of its own on it.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Runs the server, does what it is told line by line, and tidies up when nobody can tell it anything any more.
const KEEPER: &str = r#"
# Whoever interrupts us interrupts the one who tells, too: nothing more will be said, and we tidy up.
trap : INT TERM HUP PIPE
bin=$1; data=$2; port=$3; primary=$4; shift 4
start() { "$bin/postgres" -D "$data/db" -p "$port" -k "$data" "$@" >>"$data/log" 2>&1 & server=$!; }
end() { kill -CONT "$server" 2>/dev/null; kill "-$1" "$server" 2>/dev/null; wait "$server"; }
make() {
  case $primary in
    none) "$bin/initdb" -D "$data/db" -U postgres -A trust -E UTF8 --no-locale --no-sync ;;
    *) "$bin/pg_basebackup" -D "$data/db" -h 127.0.0.1 -p "$primary" -U postgres -R -X stream -c fast --no-sync ;;
  esac
}
make >"$data/log" 2>&1 || { cat "$data/log" >&2; rm -rf "$data"; exit 1; }
start "$@"
echo started
while read -r word; do
  case $word in
    start) start "$@" ;;
    stop) end INT ;;
    crash) end QUIT ;;
    promote) "$bin/pg_ctl" promote -s -w -t 60 -D "$data/db" >>"$data/log" 2>&1 ;;
  esac
  echo "$word"
done
end QUIT
rm -rf "$data"
"#;

/// The longest that a server may take to start.
const START: Duration = Duration::from_secs(60);

/// A running server.
pub struct Server {
    bin: PathBuf,
    port: u16,
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

    /// Starts a server with further settings (`name=value`).
    #[must_use]
    pub fn start(settings: &[&str]) -> Self {
        Self::launch("none", settings, &[])
    }

    /// Starts a server that speaks TLS with this certificate and key (PEM), to those who ask for it.
    #[must_use]
    pub fn start_encrypted(certificate: &str, key: &str) -> Self {
        let settings = ["ssl=on", "ssl_cert_file=../server.crt", "ssl_key_file=../server.key"];
        Self::launch("none", &settings, &[("server.crt", certificate), ("server.key", key)])
    }

    /// Starts a replica of this server, a copy of it as it is now that follows what happens from now on.
    #[must_use]
    pub fn replica(&self) -> Self {
        Self::launch(&self.port.to_string(), &[], &[])
    }

    fn launch(primary: &str, settings: &[&str], files: &[(&str, &str)]) -> Self {
        let bin = installation();
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let data = tempfile::Builder::new().prefix("oncehook-pg-").tempdir().unwrap().keep();
        let usual = ["fsync=on", "max_connections=500", "shared_buffers=256MB", "listen_addresses=127.0.0.1"];
        let settings = usual.iter().chain(settings).flat_map(|setting| ["-c", setting]);
        let mut command = unprivileged("sh", &data);
        let owner = std::fs::metadata(&data).unwrap();
        for (name, content) in files {
            let path = data.join(name);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            std::os::unix::fs::chown(&path, Some(owner.uid()), Some(owner.gid())).unwrap();
        }
        command.args(["-c", KEEPER, "keeper"]).arg(&bin).arg(&data);
        command.args([&port.to_string(), primary]).args(settings);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let words = process.stdin.take();
        let mut answers = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "started", "the server could not be made");
        let keeper = Mutex::new(Keeper { process, words, answers });
        let server = Self { bin, port, keeper, databases: AtomicU32::new(0) };
        server.wait();
        server
    }

    /// Another server's database, which is here too because this is its replica.
    #[must_use]
    pub fn same(&self, database: &Database<'_>) -> Database<'_> {
        self.database_named(&database.name)
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
        let name = format!("of_{}", hex::encode(&digest[..10]));
        let known = self
            .database_named("postgres")
            .query(&format!("SELECT count(*) FROM pg_database WHERE datname = '{name}'"));
        if known == "1" { self.database_named(&name) } else { self.make(name) }
    }

    fn make(&self, name: String) -> Database<'_> {
        self.database_named("postgres").query(&format!("CREATE DATABASE {name}"));
        Database { server: self, name }
    }

    fn database_named(&self, name: &str) -> Database<'_> {
        Database { server: self, name: name.to_owned() }
    }

    /// The port on the loopback address.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Stops the server in good order: open transactions are undone, connections end.
    pub fn stop(&self) {
        self.tell("stop");
    }

    /// Ends the server as a crash would.
    pub fn crash(&self) {
        self.tell("crash");
    }

    /// Makes a replica the primary.
    pub fn promote(&self) {
        self.tell("promote");
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
        let port = self.port.to_string();
        loop {
            let asked = Command::new(self.bin.join("pg_isready"))
                .args(["-q", "-h", "127.0.0.1", "-p", &port])
                .status()
                .unwrap();
            if asked.success() {
                return;
            }
            assert!(begun.elapsed() < START, "PostgreSQL did not start");
            std::thread::sleep(Duration::from_millis(20));
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

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How to reach it through another port (a proxy's).
    #[must_use]
    pub fn url_at(&self, port: u16) -> String {
        format!("postgres://postgres@127.0.0.1:{port}/{}", self.name)
    }

    /// Runs statements and returns the rows of the last one, a line each, columns parted by `|`. An error is a panic.
    pub fn query(&self, sql: &str) -> String {
        self.try_query(sql).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// The same, with the error's text.
    pub fn try_query(&self, sql: &str) -> Result<String, String> {
        let port = self.server.port.to_string();
        let ran = Command::new(self.server.bin.join("psql"))
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1", "-p", &port])
            .args(["-U", "postgres", "-d", &self.name, "-c", sql])
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if ran.status.success() { Ok(text(&ran.stdout)) } else { Err(text(&ran.stderr)) }
    }
}

/// Where the server's programs are: the newest of Debian's, or those on the path.
fn installation() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let numbered = versions.filter_map(|entry| {
        let version: u32 = entry.file_name().to_string_lossy().parse().ok()?;
        let bin = entry.path().join("bin");
        bin.join("postgres").exists().then_some((version, bin))
    });
    let newest = numbered.max_by_key(|(version, _)| *version);
    newest.map(|(_, bin)| bin).expect("PostgreSQL is not installed: run `make services` first")
}

/// A command that does not run as root, which PostgreSQL refuses. The directory becomes that user's.
fn unprivileged(program: &str, directory: &Path) -> Command {
    let ask = |flag: &str, user: &[&str]| {
        let answer = Command::new("id").arg(flag).args(user).output().unwrap();
        String::from_utf8(answer.stdout).unwrap().trim().to_owned()
    };
    if ask("-u", &[]) != "0" {
        return Command::new(program);
    }
    let (uid, gid) = (ask("-u", &["postgres"]), ask("-g", &["postgres"]));
    std::os::unix::fs::chown(directory, uid.parse().ok(), gid.parse().ok()).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &uid, "--regid", &gid, "--clear-groups", "--", program]);
    command.current_dir(directory);
    command
}
