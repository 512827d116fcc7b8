//! A real Redis for tests: the installed server (Debian's `redis-server`; `make services` installs it) on a directory and
//! port of its own. It keeps nothing over a restart, as a cache does.
//!
//! Promises: the server ends and its directory goes when the [`Redis`] is dropped, and also when the process ends in any
//! other way: a small shell holds it, and ends it once the pipe from this process is closed. A missing installation is a
//! panic, never a skipped test.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Runs the server, does what it is told line by line, and tidies up when nobody can tell it anything any more.
const KEEPER: &str = r#"
# Whoever interrupts us interrupts the one who tells, too: nothing more will be said, and we tidy up.
trap : INT TERM HUP PIPE
data=$1; port=$2; shift 2
start() {
  redis-server --bind 127.0.0.1 --port "$port" --dir "$data" --save '' --appendonly no "$@" >>"$data/log" 2>&1 &
  server=$!
}
end() { kill -CONT "$server" 2>/dev/null; kill -KILL "$server" 2>/dev/null; wait "$server" 2>/dev/null; }
start "$@"
echo started
while read -r word; do
  case $word in
    start) start "$@" ;;
    stop) end ;;
    freeze) kill -STOP "$server" ;;
    thaw) kill -CONT "$server" ;;
  esac
  echo "$word"
done
end
rm -rf "$data"
"#;

/// The longest that a server may take to start.
const START: Duration = Duration::from_secs(30);

/// A running server.
pub struct Redis {
    port: u16,
    keeper: Mutex<Keeper>,
}

struct Keeper {
    process: Child,
    words: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Redis {
    /// Starts a server with further settings, as on its command line.
    #[must_use]
    pub fn start(settings: &[&str]) -> Self {
        let installed = Command::new("redis-server").arg("--version").output();
        assert!(installed.is_ok(), "Redis is not installed: run `make services` first");
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let data = tempfile::Builder::new().prefix("oncehook-redis-").tempdir().unwrap().keep();
        let mut command = Command::new("sh");
        command.args(["-c", KEEPER, "keeper"]).arg(&data).arg(port.to_string()).args(settings);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let words = process.stdin.take();
        let mut answers = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "started");
        let redis = Self { port, keeper: Mutex::new(Keeper { process, words, answers }) };
        redis.wait();
        redis
    }

    /// The port on the loopback address.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// How to reach it.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Ends the server as a power switch would. It remembers nothing.
    pub fn stop(&self) {
        self.tell("stop");
    }

    /// Starts it again, empty, on the same port.
    pub fn restart(&self) {
        self.tell("start");
        self.wait();
    }

    /// Stops it in its tracks: connections stand, nothing is answered.
    pub fn freeze(&self) {
        self.tell("freeze");
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.tell("thaw");
    }

    /// Gives a command and returns what the server says, a line for each part.
    pub fn ask(&self, command: &[&str]) -> String {
        let said = Command::new("redis-cli").args(["-p", &self.port.to_string()]).args(command).output().unwrap();
        String::from_utf8_lossy(&said.stdout).trim().to_owned()
    }

    fn tell(&self, word: &str) {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(keeper.words.as_mut().unwrap(), "{word}").unwrap();
        let mut answer = String::new();
        keeper.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer.trim(), word);
    }

    /// Waits until it answers.
    fn wait(&self) {
        let begun = Instant::now();
        while !matches!(self.ask(&["PING"]).as_str(), "PONG" | "NOAUTH Authentication required.") {
            assert!(begun.elapsed() < START, "Redis did not start");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        keeper.words = None;
        // The keeper ends the server, however it goes; there is nobody left to tell.
        let _ = keeper.process.wait();
    }
}
