//! A TCP proxy that misbehaves when it is told to, in front of any server: PostgreSQL, MariaDB, Redis, a destination over HTTP.
//!
//! Promises: left alone it passes every byte in order and a half-closed connection as such. Orders hold when the call
//! returns: after [`cut`](ChaosProxy::cut) the connections of that moment are gone, after [`refuse`](ChaosProxy::refuse) no
//! new one is made. The port stays its own while it refuses. It runs on a thread of its own, so a test may block.
//!
//! Does not: understand a protocol. A [`Trap`] looks for bytes; which bytes mean "commit" is the test's to know:
//!
//! ```no_run
//! # use oncehook_testkit::chaos_proxy::{ChaosProxy, Direction, Trap};
//! # let server = 5432;
//! let proxy = ChaosProxy::start(server);
//! // The client's COMMIT never reaches the server.
//! let trap = proxy.set(Trap::on(Direction::ToServer, "COMMIT"));
//! // The server has committed, and its answer never reaches the client (PostgreSQL names what it did) …
//! let trap = proxy.set(Trap::on(Direction::ToClient, "COMMIT\0"));
//! // … or, where the answer has no name (MariaDB): what the server says after the client's COMMIT is swallowed.
//! let trap = proxy.set(Trap::on(Direction::ToServer, "COMMIT").swallowing_the_answer());
//! trap.wait();
//! ```

use std::collections::HashSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};

/// The longest that an order may take to be carried out, and that a trap is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a server that has begun to answer is listened to, before the connection is cut.
const ANSWERING: Duration = Duration::from_millis(100);

/// How long a server is waited for that does not answer at all.
const SILENT: Duration = Duration::from_secs(10);

/// Where bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// How a connection ends, on both its sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// At once, with a reset. Bytes under way are lost.
    Reset,
    /// As a program that ends closes it.
    Finish,
}

/// Waits for bytes to pass, and cuts the connection on which they do. Goes off once.
#[derive(Debug, Clone)]
pub struct Trap {
    direction: Direction,
    bait: Bait,
    answer: Answer,
    cut: Cut,
}

#[derive(Debug, Clone)]
enum Bait {
    /// These bytes, after they have passed so many times.
    Pattern { bytes: Vec<u8>, spared: usize },
    /// So many further bytes, on all connections together.
    Count(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The bait does not pass; what stood before it does.
    NotAsked,
    /// The bait passes, and what the server says then does not.
    Swallowed,
}

impl Trap {
    /// Cuts before the last of these bytes has passed: whoever they were for cannot have understood them.
    #[must_use]
    pub fn on(direction: Direction, bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref().to_vec();
        assert!(!bytes.is_empty(), "a pattern of no bytes");
        let bait = Bait::Pattern { bytes, spared: 0 };
        Self { direction, bait, answer: Answer::NotAsked, cut: Cut::Reset }
    }

    /// Cuts once so many further bytes have passed, whatever they are.
    #[must_use]
    pub fn after(direction: Direction, bytes: u64) -> Self {
        Self { direction, bait: Bait::Count(bytes), answer: Answer::NotAsked, cut: Cut::Reset }
    }

    /// Lets the pattern pass so many times before.
    #[must_use]
    pub fn sparing(mut self, times: usize) -> Self {
        if let Bait::Pattern { spared, .. } = &mut self.bait {
            *spared = times;
        }
        self
    }

    /// Lets the bytes pass to the server, and cuts once the server has begun to answer (or after ten seconds): it has
    /// done what it was asked for, and the client never hears.
    #[must_use]
    pub fn swallowing_the_answer(mut self) -> Self {
        assert_eq!(self.direction, Direction::ToServer, "only the server answers");
        self.answer = Answer::Swallowed;
        self
    }

    /// Ends the connection in this way instead of a reset.
    #[must_use]
    pub fn ending(mut self, cut: Cut) -> Self {
        self.cut = cut;
        self
    }
}

/// A trap that was set.
pub struct SetTrap {
    number: u64,
    shared: Arc<Shared>,
}

impl SetTrap {
    /// Whether it has gone off, and the connection is cut.
    #[must_use]
    pub fn has_gone_off(&self) -> bool {
        self.shared.book().gone_off.contains(&self.number)
    }

    /// Waits until it has gone off and the connection is cut. If it never does, that is a panic.
    pub fn wait(&self) {
        self.shared.wait("the trap did not go off", |book| book.gone_off.contains(&self.number));
    }
}

/// The proxy. Dropped, it resets its connections and stops listening.
pub struct ChaosProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    orders: mpsc::UnboundedSender<Order>,
    thread: Option<JoinHandle<()>>,
}

enum Order {
    Refuse,
    Listen,
    End,
}

struct Shared {
    weather: watch::Sender<Weather>,
    book: Mutex<Book>,
    changed: Condvar,
    to_server: AtomicU64,
    to_client: AtomicU64,
}

/// What holds for all connections.
#[derive(Debug, Clone)]
struct Weather {
    upstream: SocketAddr,
    stalled: HashSet<Direction>,
    delay: Duration,
    /// Connections up to this number are cut.
    cut_to: u64,
    cut: Cut,
}

#[derive(Default)]
struct Book {
    /// The number of the last connection.
    last: u64,
    open: HashSet<u64>,
    listening: bool,
    last_trap: u64,
    traps: Vec<(u64, Trap)>,
    gone_off: HashSet<u64>,
}

impl Shared {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Book) -> T) -> T {
        let value = change(&mut self.book());
        self.changed.notify_all();
        value
    }

    fn wait(&self, otherwise: &str, until: impl Fn(&Book) -> bool) {
        let begun = Instant::now();
        let mut book = self.book();
        while !until(&book) {
            assert!(begun.elapsed() < PATIENCE, "{otherwise}");
            let (next, _) =
                self.changed.wait_timeout(book, Duration::from_secs(1)).unwrap_or_else(PoisonError::into_inner);
            book = next;
        }
    }

    fn passed(&self, direction: Direction) -> &AtomicU64 {
        match direction {
            Direction::ToServer => &self.to_server,
            Direction::ToClient => &self.to_client,
        }
    }
}

impl ChaosProxy {
    /// Listens on a free port of 127.0.0.1, in front of a port of 127.0.0.1.
    #[must_use]
    pub fn start(port: u16) -> Self {
        Self::before((Ipv4Addr::LOCALHOST, port))
    }

    /// The same, in front of any address.
    #[must_use]
    pub fn before(upstream: impl ToSocketAddrs) -> Self {
        let weather = Weather {
            upstream: address(upstream),
            stalled: HashSet::new(),
            delay: Duration::ZERO,
            cut_to: 0,
            cut: Cut::Reset,
        };
        let shared = Arc::new(Shared {
            weather: watch::Sender::new(weather),
            book: Mutex::new(Book { listening: true, ..Book::default() }),
            changed: Condvar::new(),
            to_server: AtomicU64::new(0),
            to_client: AtomicU64::new(0),
        });
        let socket = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let address = socket.local_addr().unwrap();
        let (orders, queue) = mpsc::unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let works = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                let listener = TcpListener::from_std(socket).unwrap();
                listen(listener, address, works, queue).await;
            });
        });
        Self { address, shared, orders, thread: Some(thread) }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port that it listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// New connections lead there from now on.
    pub fn lead_to(&self, upstream: impl ToSocketAddrs) {
        let upstream = address(upstream);
        self.shared.weather.send_modify(|weather| weather.upstream = upstream);
    }

    /// Cuts all connections on which anything has passed yet. New ones are taken.
    pub fn cut(&self, cut: Cut) {
        let last = self.shared.book().last;
        self.shared.weather.send_modify(|weather| {
            weather.cut_to = last;
            weather.cut = cut;
        });
        self.shared.wait("a connection was not cut", |book| book.open.iter().all(|number| *number > last));
    }

    /// Holds all bytes back, of connections that are open and of new ones. Nobody is told.
    pub fn stall(&self) {
        self.stall_only(Direction::ToServer);
        self.stall_only(Direction::ToClient);
    }

    /// Holds the bytes of one direction back.
    pub fn stall_only(&self, direction: Direction) {
        self.shared.weather.send_modify(|weather| {
            weather.stalled.insert(direction);
        });
    }

    /// Lets bytes pass again, those that were held first.
    pub fn resume(&self) {
        self.shared.weather.send_modify(|weather| weather.stalled.clear());
    }

    /// Every piece takes so much longer, in each direction. Pieces do not overtake each other, and do not overlap.
    pub fn delay(&self, delay: Duration) {
        self.shared.weather.send_modify(|weather| weather.delay = delay);
    }

    /// Refuses new connections, as a port does that nobody listens on. Open ones stay.
    pub fn refuse(&self) {
        self.order(Order::Refuse, false);
    }

    /// Takes connections again.
    pub fn accept(&self) {
        self.order(Order::Listen, true);
    }

    /// The server is gone: all connections are reset and new ones refused.
    pub fn down(&self) {
        self.refuse();
        self.cut(Cut::Reset);
    }

    /// The server is back, and nothing is held.
    pub fn up(&self) {
        self.resume();
        self.accept();
    }

    fn order(&self, order: Order, listening: bool) {
        self.orders.send(order).expect("the proxy runs");
        self.shared.wait("the proxy does not answer", |book| book.listening == listening);
    }

    /// Sets a trap for the bytes that pass from now on.
    pub fn set(&self, trap: Trap) -> SetTrap {
        let number = self.shared.change(|book| {
            book.last_trap += 1;
            book.traps.push((book.last_trap, trap));
            book.last_trap
        });
        SetTrap { number, shared: Arc::clone(&self.shared) }
    }

    /// Takes away all traps that have not gone off.
    pub fn disarm(&self) {
        self.shared.change(|book| book.traps.clear());
    }

    /// Connections that are open now.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.book().open.len()
    }

    /// Connections that were ever made.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.shared.book().last
    }

    /// Bytes that have passed.
    #[must_use]
    pub fn passed(&self, direction: Direction) -> u64 {
        self.shared.passed(direction).load(Ordering::Relaxed)
    }
}

impl Drop for ChaosProxy {
    fn drop(&mut self) {
        // If the thread is gone already, there is nothing left to end.
        let _ = self.orders.send(Order::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn address(of: impl ToSocketAddrs) -> SocketAddr {
    of.to_socket_addrs().unwrap().next().expect("an address")
}

/// Takes connections and orders. When it returns, its runtime ends, and every connection with it.
async fn listen(
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
    mut orders: mpsc::UnboundedReceiver<Order>,
) {
    let mut listener = Some(listener);
    // Bound and deaf: connections are refused, and nobody else gets the port.
    let mut placeholder: Option<TcpSocket> = None;
    loop {
        let accepting = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            order = orders.recv() => match order {
                Some(Order::Refuse) if listener.is_some() => {
                    drop(listener.take());
                    placeholder = Some(hold(address).await);
                    shared.change(|book| book.listening = false);
                }
                Some(Order::Listen) => {
                    if let Some(socket) = placeholder.take() {
                        listener = Some(socket.listen(1024).unwrap());
                    }
                    shared.change(|book| book.listening = true);
                }
                Some(Order::Refuse) => {}
                Some(Order::End) | None => return,
            },
            accepted = accepting => {
                if let Ok((client, _)) = accepted {
                    let number = shared.change(|book| {
                        book.last += 1;
                        book.open.insert(book.last);
                        book.last
                    });
                    tokio::spawn(carry(number, client, Arc::clone(&shared)));
                }
            }
        }
    }
}

/// A socket that has the port.
async fn hold(address: SocketAddr) -> TcpSocket {
    let begun = Instant::now();
    loop {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        match socket.bind(address) {
            Ok(()) => return socket,
            // The listener's own end takes a moment.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && begun.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Err(error) => panic!("the port of the proxy is lost: {error}"),
        }
    }
}

/// One connection, from its beginning to its end.
async fn carry(number: u64, mut client: TcpStream, shared: Arc<Shared>) {
    let upstream = shared.weather.borrow().upstream;
    let (cut, trap) = match TcpStream::connect(upstream).await {
        Ok(mut server) => {
            // Bytes go on as they come; a small message must not wait for the next.
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            let end = run(number, &mut client, &mut server, &shared).await;
            close(server, end.cut).await;
            (end.cut, end.trap)
        }
        Err(_) => (Cut::Reset, None),
    };
    close(client, cut).await;
    shared.change(|book| {
        book.open.remove(&number);
        book.gone_off.extend(trap);
    });
}

/// Why a connection is over.
struct End {
    cut: Cut,
    trap: Option<u64>,
}

impl End {
    fn reset(_: io::Error) -> Self {
        Self { cut: Cut::Reset, trap: None }
    }
}

async fn run(number: u64, client: &mut TcpStream, server: &mut TcpStream, shared: &Shared) -> End {
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    // Set when a trap has let its bait pass and now listens for the answer.
    let caught = watch::Sender::new(None);
    let there = Pump { direction: Direction::ToServer, shared, caught: &caught };
    let back = Pump { direction: Direction::ToClient, shared, caught: &caught };
    let mut weather = shared.weather.subscribe();
    let ordered = async {
        // The sender is in what is shared, so it is there.
        weather.wait_for(|weather| number <= weather.cut_to).await.map_or(Cut::Reset, |weather| weather.cut)
    };
    let silent = async {
        let caught = caught.subscribe().wait_for(Option::is_some).await.ok().and_then(|caught| *caught);
        tokio::time::sleep(SILENT).await;
        match caught {
            Some((trap, cut)) => End { cut, trap: Some(trap) },
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        cut = ordered => End { cut, trap: None },
        end = silent => end,
        both = async { tokio::try_join!(there.run(from_client, to_server), back.run(from_server, to_client)) } => {
            match both {
                Ok(_) => End { cut: Cut::Finish, trap: None },
                Err(end) => end,
            }
        }
    }
}

async fn close(mut stream: TcpStream, cut: Cut) {
    // A socket that is closed already needs no more.
    let _ = match cut {
        Cut::Reset => stream.set_zero_linger(),
        Cut::Finish => stream.shutdown().await,
    };
}

type Caught = Option<(u64, Cut)>;

/// One direction of a connection.
struct Pump<'c> {
    direction: Direction,
    shared: &'c Shared,
    caught: &'c watch::Sender<Caught>,
}

impl Pump<'_> {
    async fn run(&self, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> Result<(), End> {
        let mut weather = self.shared.weather.subscribe();
        let mut buffer = vec![0; 64 << 10];
        let mut before = Vec::new();
        loop {
            let read = from.read(&mut buffer).await.map_err(End::reset)?;
            let Ok(()) = weather.wait_for(|weather| !weather.stalled.contains(&self.direction)).await.map(|_| ())
            else {
                return Ok(());
            };
            let delay = weather.borrow().delay;
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            if read == 0 {
                // The other side hears of it, and may still speak.
                return to.shutdown().await.map_err(End::reset);
            }
            let caught = *self.caught.borrow();
            if let (Direction::ToClient, Some((trap, cut))) = (self.direction, caught) {
                tokio::time::sleep(ANSWERING).await;
                return Err(End { cut, trap: Some(trap) });
            }
            let piece = &buffer[..read];
            let sprung = self.shared.book().spring(self.direction, &mut before, piece);
            let passes = sprung.as_ref().map_or(read, |sprung| sprung.passes);
            if let Some(sprung) = &sprung
                && sprung.answer == Answer::Swallowed
            {
                // Before the bytes go, or the answer could be quicker.
                self.caught.send_replace(Some((sprung.trap, sprung.cut)));
            }
            to.write_all(&piece[..passes]).await.map_err(End::reset)?;
            self.shared.passed(self.direction).fetch_add(passes as u64, Ordering::Relaxed);
            if let Some(sprung) = sprung
                && sprung.answer == Answer::NotAsked
            {
                return Err(End { cut: sprung.cut, trap: Some(sprung.trap) });
            }
        }
    }
}

/// A trap that has found its bait in a piece.
struct Sprung {
    trap: u64,
    cut: Cut,
    answer: Answer,
    /// So much of the piece goes on.
    passes: usize,
}

impl Book {
    /// Looks at a piece of a connection, and takes away the first trap that it springs. `before` is what has passed on the
    /// same connection just before, as far as a pattern may have begun there.
    fn spring(&mut self, direction: Direction, before: &mut Vec<u8>, piece: &[u8]) -> Option<Sprung> {
        let known = before.len();
        before.extend_from_slice(piece);
        let mut found = None;
        let mut longest = 1;
        for (place, (number, trap)) in self.traps.iter_mut().enumerate() {
            if trap.direction != direction {
                continue;
            }
            let hit = match &mut trap.bait {
                Bait::Pattern { bytes, spared } => {
                    longest = longest.max(bytes.len());
                    // A match that ended earlier was counted then.
                    let from = (known + 1).saturating_sub(bytes.len());
                    let matches = before[from..].windows(bytes.len()).enumerate();
                    let mut hit = None;
                    for (at, _) in matches.filter(|(_, window)| *window == bytes.as_slice()) {
                        if *spared == 0 {
                            hit = Some((from + at).saturating_sub(known));
                            break;
                        }
                        *spared -= 1;
                    }
                    hit
                }
                Bait::Count(left) => {
                    let hit = usize::try_from(*left).ok().filter(|left| *left <= piece.len());
                    *left = left.saturating_sub(piece.len() as u64);
                    hit
                }
            };
            if let (None, Some(at)) = (&found, hit) {
                let passes = if trap.answer == Answer::Swallowed { piece.len() } else { at };
                found = Some((place, Sprung { trap: *number, cut: trap.cut, answer: trap.answer, passes }));
            }
        }
        let keep = before.len().saturating_sub(longest - 1);
        before.drain(..keep);
        found.map(|(place, sprung)| {
            self.traps.remove(place);
            sprung
        })
    }
}

#[cfg(test)]
mod tests;
