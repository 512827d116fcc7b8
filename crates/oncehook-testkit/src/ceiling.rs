//! The ceiling for benchmarks: a gateway whose journal answers at once and keeps nothing.
//!
//! Accept loop, verification, identification and digest are the real ones; only the append is missing. What the real
//! gateway reaches of this rate is what durability costs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Claim, Fence, RouteName, Settled, Settlement};
use oncehook::event::{EventId, EventIds, NewEvents};
use oncehook::journal::{
    AppendError, Appended, Backlog, BoxFuture, Deliveries, Durability, EventDetail, EventPage, EventQuery, Forgotten,
    Journal, JournalReader, JournalState, KnownCopy, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress,
    ReadError, Receipt, Retention, SelfTestError, Stats, StoredBody, Ticket, Verdict, Who, WorkError,
};
use oncehook::route::Route;
use oncehook_server::app::App;
use oncehook_server::config::Config;
use oncehook_verify::UnixMicros;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};

/// Keeps nothing. Benchmarks only.
struct NoJournal(Mutex<EventIds>);

impl Journal for NoJournal {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        let mut ids = self.0.lock().unwrap();
        let receipt: Receipt = events
            .iter()
            .map(|event| Appended {
                id: ids.next(event.received_at),
                verdict: Verdict::New,
                expires_at: event.expires_at,
            })
            .collect();
        let (answer, ticket) = oneshot::channel();
        let _ = answer.send(Ok(receipt));
        Ok(ticket)
    }

    fn note_duplicates(&self, _: &[KnownCopy<'_>]) -> bool {
        // Nothing is known here, so nothing can be a duplicate.
        false
    }

    fn state(&self) -> JournalState {
        JournalState {
            kind: "none",
            durability: Durability::None,
            failing: None,
            queued: 0,
            queue_limit: 0,
            index_lag: 0,
            wal_pages: 0,
        }
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        Box::pin(async { Ok(()) })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

impl JournalReader for NoJournal {
    fn list(&self, _: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        Box::pin(async { Ok(EventPage::default()) })
    }

    fn show(&self, _: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        Box::pin(async { Ok(None) })
    }

    fn body(&self, _: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        Box::pin(async { Ok(None) })
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        Box::pin(async { Ok(Stats::default()) })
    }
}

/// Nothing is stored, so nothing is ever due.
impl Deliveries for NoJournal {
    fn changes(&self) -> watch::Receiver<u64> {
        watch::Sender::new(0).subscribe()
    }

    fn apply(&self, _: Arc<Route>, _: usize) -> BoxFuture<'_, Result<Progress, WorkError>> {
        nothing()
    }

    fn claim(&self, _: Arc<Route>, _: usize, _: Duration) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>> {
        nothing()
    }

    fn call(&self, _: Arc<Route>, _: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        nothing()
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        Box::pin(async move { Ok(settlements.iter().map(|_| Settled::Lost).collect()) })
    }

    fn renew(&self, _: Vec<Fence>, _: Duration) -> BoxFuture<'_, Result<(), WorkError>> {
        nothing()
    }

    fn give_back(&self, _: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>> {
        nothing()
    }

    fn reclaim(&self, _: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>> {
        nothing()
    }

    fn next_due(&self, _: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>> {
        nothing()
    }

    fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>> {
        nothing()
    }

    fn order(&self, _: Order) -> BoxFuture<'_, Result<Ordered, OrderError>> {
        Box::pin(async { Err(OrderError::NoEvent) })
    }

    fn set_paused(&self, _: Pause, _: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async { Err(WorkError::Unsupported("nothing is kept here".to_owned())) })
    }

    fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>> {
        nothing()
    }

    fn pauses(&self) -> BoxFuture<'_, Result<Vec<Paused>, WorkError>> {
        nothing()
    }

    fn forget(&self, _: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>> {
        nothing()
    }
}

fn nothing<T: Default + Send>() -> BoxFuture<'static, Result<T, WorkError>> {
    Box::pin(async { Ok(T::default()) })
}

/// Runs the ceiling with the configuration in the working directory until the process is killed.
pub fn serve() -> anyhow::Result<()> {
    let config = Config::load("oncehook.toml".as_ref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let ingress = TcpListener::bind(config.server.ingress).await?;
        let admin = TcpListener::bind(config.server.admin).await?;
        welcome(ingress.local_addr()?, admin.local_addr()?);
        let journal = Arc::new(NoJournal(Mutex::new(EventIds::above(0, 0))));
        App::new(config, journal, Clock::system()).run(ingress, admin, std::future::pending()).await;
        Ok(())
    })
}

/// The lines that the harness waits for, as the gateway prints them.
fn welcome(ingress: SocketAddr, admin: SocketAddr) {
    eprintln!("webhooks  http://{ingress}/webhooks/stripe\nadmin     http://{admin}/\nSend a signed webhook");
}
