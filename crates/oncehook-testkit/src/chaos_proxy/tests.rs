//! The proxy in front of a server that notes what it hears and says it back.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{ChaosProxy, Cut, Direction, Trap};

/// Says back what it hears, in capitals.
struct Echo {
    port: u16,
    heard: Arc<Mutex<Vec<u8>>>,
}

impl Echo {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&heard);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, notes) = (stream.unwrap(), Arc::clone(&notes));
                std::thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(read) = stream.read(&mut buffer) {
                        if read == 0 {
                            let _ = stream.write_all(b"GOODBYE");
                            return;
                        }
                        notes.lock().unwrap().extend_from_slice(&buffer[..read]);
                        if stream.write_all(&buffer[..read].to_ascii_uppercase()).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { port, heard }
    }

    fn heard(&self) -> String {
        String::from_utf8(self.heard.lock().unwrap().clone()).unwrap()
    }
}

fn connect(proxy: &ChaosProxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

fn read(stream: &mut TcpStream, bytes: usize) -> String {
    let mut buffer = vec![0; bytes];
    stream.read_exact(&mut buffer).unwrap();
    String::from_utf8(buffer).unwrap()
}

fn say(stream: &mut TcpStream, text: &str) -> String {
    stream.write_all(text.as_bytes()).unwrap();
    read(stream, text.len())
}

/// What the end of a connection looks like to whoever reads on it.
fn end(stream: &mut TcpStream) -> Result<String, ErrorKind> {
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).map(|_| String::from_utf8(rest).unwrap()).map_err(|error| error.kind())
}

#[test]
fn left_alone_it_passes_everything_and_half_closed_connections() {
    let (echo, text) = (Echo::start(), "a".repeat(300_000));
    let proxy = ChaosProxy::start(echo.port);
    let mut stream = connect(&proxy);
    let mut writer = stream.try_clone().unwrap();
    let sent = text.clone();
    let writing = std::thread::spawn(move || writer.write_all(sent.as_bytes()).unwrap());
    assert_eq!(read(&mut stream, text.len()), text.to_uppercase());
    writing.join().unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(end(&mut stream), Ok("GOODBYE".to_owned()));
    assert_eq!(proxy.passed(Direction::ToServer), 300_000);
    assert_eq!(proxy.passed(Direction::ToClient), 300_007);
    assert_eq!(proxy.accepted(), 1);
}

#[test]
fn cuts_with_a_reset_or_an_end_and_takes_new_connections() {
    let echo = Echo::start();
    let proxy = ChaosProxy::start(echo.port);
    for (cut, seen) in [(Cut::Reset, Err(ErrorKind::ConnectionReset)), (Cut::Finish, Ok(String::new()))] {
        let mut streams = [connect(&proxy), connect(&proxy)];
        for stream in &mut streams {
            assert_eq!(say(stream, "hello"), "HELLO");
        }
        proxy.cut(cut);
        assert_eq!(proxy.connections(), 0);
        for stream in &mut streams {
            assert_eq!(end(stream), seen, "{cut:?}");
        }
    }
    assert_eq!(say(&mut connect(&proxy), "again"), "AGAIN");
}

#[test]
fn holds_bytes_back_and_lets_them_go() {
    let echo = Echo::start();
    let proxy = ChaosProxy::start(echo.port);
    let mut stream = connect(&proxy);
    assert_eq!(say(&mut stream, "one"), "ONE");
    for stalls in [ChaosProxy::stall, |proxy: &ChaosProxy| proxy.stall_only(Direction::ToClient)] {
        stalls(&proxy);
        stream.write_all(b"two").unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let waited = stream.read(&mut [0; 1]).unwrap_err();
        assert!(matches!(waited.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{waited}");
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        proxy.resume();
        assert_eq!(read(&mut stream, 3), "TWO");
    }
    // A direction of its own: the server has heard the second, not the first, before it was let go. Both are there now.
    assert_eq!(echo.heard(), "onetwotwo");
}

#[test]
fn takes_its_time_when_told() {
    let echo = Echo::start();
    let proxy = ChaosProxy::start(echo.port);
    let mut stream = connect(&proxy);
    proxy.delay(Duration::from_millis(150));
    let begun = Instant::now();
    assert_eq!(say(&mut stream, "slow"), "SLOW");
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    proxy.delay(Duration::ZERO);
    let begun = Instant::now();
    assert_eq!(say(&mut stream, "fast"), "FAST");
    assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
}

#[test]
fn refuses_connections_keeps_open_ones_and_keeps_its_port() {
    let echo = Echo::start();
    let proxy = ChaosProxy::start(echo.port);
    let mut stream = connect(&proxy);
    assert_eq!(say(&mut stream, "before"), "BEFORE");
    for _ in 0..3 {
        proxy.refuse();
        let refused = TcpStream::connect(proxy.address()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        let others = tokio::net::TcpSocket::new_v4().unwrap().bind(proxy.address());
        assert_eq!(others.unwrap_err().kind(), ErrorKind::AddrInUse);
        assert_eq!(say(&mut stream, "while"), "WHILE");
        proxy.accept();
        assert_eq!(say(&mut connect(&proxy), "after"), "AFTER");
    }
    proxy.down();
    assert_eq!(end(&mut stream), Err(ErrorKind::ConnectionReset));
    assert!(TcpStream::connect(proxy.address()).is_err());
    proxy.up();
    assert_eq!(say(&mut connect(&proxy), "up"), "UP");
}

#[test]
fn a_trap_cuts_before_the_bytes_arrive() {
    let echo = Echo::start();
    let proxy = ChaosProxy::start(echo.port);
    let trap = proxy.set(Trap::on(Direction::ToServer, "commit").sparing(1));
    let mut other = connect(&proxy);
    let mut stream = connect(&proxy);
    assert_eq!(say(&mut stream, "begin commit"), "BEGIN COMMIT");
    assert!(!trap.has_gone_off());
    // In two pieces: the server gets the first, which is no commit yet.
    assert_eq!(say(&mut stream, "begin com"), "BEGIN COM");
    stream.write_all(b"mit more").unwrap();
    trap.wait();
    assert_eq!(end(&mut stream), Err(ErrorKind::ConnectionReset));
    assert_eq!(echo.heard(), "begin commitbegin com");
    // It goes off once, and on one connection.
    assert_eq!(say(&mut other, "commit"), "COMMIT");
}

#[test]
fn a_trap_cuts_before_the_answer_arrives() {
    let echo = Echo::start();
    let proxy = ChaosProxy::start(echo.port);
    let mut stream = connect(&proxy);
    let trap = proxy.set(Trap::on(Direction::ToClient, "COMMIT").ending(Cut::Finish));
    stream.write_all(b"x commit").unwrap();
    trap.wait();
    assert_eq!(end(&mut stream), Ok("X ".to_owned()));

    let mut stream = connect(&proxy);
    let trap = proxy.set(Trap::on(Direction::ToServer, "commit").swallowing_the_answer());
    stream.write_all(b"y commit").unwrap();
    trap.wait();
    assert_eq!(end(&mut stream), Err(ErrorKind::ConnectionReset));
    assert_eq!(echo.heard(), "x commity commit");
}

#[test]
fn a_trap_counts_bytes() {
    let echo = Echo::start();
    let proxy = ChaosProxy::start(echo.port);
    let mut stream = connect(&proxy);
    let trap = proxy.set(Trap::after(Direction::ToClient, 7).ending(Cut::Finish));
    assert_eq!(say(&mut stream, "12345"), "12345");
    stream.write_all(b"67890").unwrap();
    trap.wait();
    assert_eq!(end(&mut stream), Ok("67".to_owned()));
    assert_eq!(echo.heard(), "1234567890");
}

#[test]
fn a_trap_that_was_taken_away_does_not_go_off() {
    let echo = Echo::start();
    let proxy = ChaosProxy::start(echo.port);
    let mut stream = connect(&proxy);
    let trap = proxy.set(Trap::after(Direction::ToClient, 7));
    assert_eq!(say(&mut stream, "12345"), "12345");
    proxy.disarm();
    assert_eq!(say(&mut stream, "67890"), "67890");
    assert!(!trap.has_gone_off());
}

#[test]
fn leads_elsewhere_when_told() {
    let (one, two) = (Echo::start(), Echo::start());
    let proxy = ChaosProxy::start(one.port);
    let mut stream = connect(&proxy);
    assert_eq!(say(&mut stream, "o"), "O");
    proxy.lead_to(("127.0.0.1", two.port));
    assert_eq!(say(&mut stream, "ld"), "LD");
    assert_eq!(say(&mut connect(&proxy), "new"), "NEW");
    assert_eq!((one.heard(), two.heard()), ("old".to_owned(), "new".to_owned()));
}
