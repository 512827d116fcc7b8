//! What senders do to an endpoint, hazard by hazard.
//!
//! Promises: every event of a hazard is delivered at least twice, unless its first answer shows that a provider would not send
//! again (`slow`); a sender whose attempts were all refused goes on as a provider would, three times more.
//!
//! Does not: judge. It only takes down what the senders heard.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use indicatif::ProgressBar;
use tokio::sync::{Barrier, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::attempt::{Ending, Sender};
use super::event::{Age, Event, Maker};
use super::hazard::Hazard;

/// Connections at a time, over all events.
const CONNECTIONS: usize = 256;

/// How often a sender goes on that was only ever refused.
const PERSISTENCE: usize = 3;

/// Requests that go out later than the first although they are older or newer: this many at once.
const LANES: usize = 8;

/// The speeds of a storm.
pub(super) struct Pace {
    /// Copies of each event.
    pub(super) copies: usize,
    /// Between an attempt that failed and the next.
    pub(super) pause: Duration,
    /// How long a sender waits for an answer.
    pub(super) timeout: Duration,
    /// When a copy comes that nobody expects any more.
    pub(super) replay_after: Duration,
    /// The attempts of a profile.
    pub(super) schedule: Vec<Duration>,
}

/// Everything it takes to deliver.
pub(super) struct Script {
    pub(super) maker: Maker,
    pub(super) sender: Sender,
    pub(super) pace: Pace,
    pub(super) progress: ProgressBar,
}

/// What the senders of one event heard.
pub(super) struct Heard {
    pub(super) key: String,
    pub(super) endings: Vec<Ending>,
}

impl Heard {
    /// Whether a sender believes that the event has arrived.
    pub(super) fn is_acknowledged(&self) -> bool {
        self.endings.iter().any(Ending::is_acknowledged)
    }
}

/// Delivers the events of a hazard.
pub(super) async fn deliver(script: &Arc<Script>, hazard: Hazard, events: Vec<Event>) -> anyhow::Result<Vec<Heard>> {
    if hazard == Hazard::Reordered {
        return reordered(script, events).await;
    }
    let room = Arc::new(Semaphore::new((CONNECTIONS / script.pace.copies).max(1)));
    let mut senders = JoinSet::new();
    for event in events {
        let permit = Arc::clone(&room).acquire_owned().await.context("make room for an event")?;
        let script = Arc::clone(script);
        senders.spawn(async move {
            let heard = script.one(hazard, &event).await;
            script.progress.inc(1);
            drop(permit);
            heard
        });
    }
    let mut all = Vec::new();
    while let Some(heard) = senders.join_next().await {
        all.push(heard.context("a sender failed")??);
    }
    Ok(all)
}

impl Script {
    /// All attempts for one event.
    async fn one(self: &Arc<Self>, hazard: Hazard, event: &Event) -> anyhow::Result<Heard> {
        let mut endings = match hazard {
            Hazard::Race => self.race(event).await?,
            Hazard::Partial => self.partial(event).await?,
            Hazard::Slow => self.slow(event).await?,
            Hazard::Replay => self.replay(event).await?,
            Hazard::Resigned => self.resigned(event).await?,
            Hazard::Conflict => self.conflict(event).await?,
            Hazard::Schedule => self.schedule(event).await?,
            Hazard::Reordered => Vec::new(),
        };
        self.persist(event, &mut endings).await?;
        Ok(Heard { key: event.key().to_owned(), endings })
    }

    async fn whole(&self, event: &Event) -> anyhow::Result<Ending> {
        Ok(self.sender.whole(self.maker.sign(event, Age::Now)?).await)
    }

    async fn cut(&self, event: &Event, hold: Duration) -> anyhow::Result<Ending> {
        Ok(self.sender.cut(self.maker.sign(event, Age::Now)?, hold).await)
    }

    /// Goes on until somebody has said that the event arrived.
    async fn persist(&self, event: &Event, endings: &mut Vec<Ending>) -> anyhow::Result<()> {
        for _ in 0..PERSISTENCE {
            if endings.iter().any(Ending::is_acknowledged) {
                break;
            }
            sleep(self.pace.pause).await;
            endings.push(self.whole(event).await?);
        }
        Ok(())
    }

    /// All copies at once. Those that were refused try again when all have been answered.
    async fn race(self: &Arc<Self>, event: &Event) -> anyhow::Result<Vec<Ending>> {
        let start = Arc::new(Barrier::new(self.pace.copies));
        let mut copies = JoinSet::new();
        for _ in 0..self.pace.copies {
            let (script, start, event) = (Arc::clone(self), Arc::clone(&start), event.clone());
            copies.spawn(async move {
                let ready = script.maker.sign(&event, Age::Now);
                start.wait().await;
                Ok::<_, anyhow::Error>(script.sender.whole(ready?).await)
            });
        }
        let mut endings = Vec::new();
        while let Some(ending) = copies.join_next().await {
            endings.push(ending.context("a copy failed")??);
        }
        let refused = endings.iter().filter(|ending| !ending.is_acknowledged()).count();
        for _ in 0..refused.min(PERSISTENCE) {
            endings.push(self.whole(event).await?);
        }
        Ok(endings)
    }

    /// Goes away at once, goes away a little later, then waits.
    async fn partial(&self, event: &Event) -> anyhow::Result<Vec<Ending>> {
        let mut endings = Vec::new();
        for hold in [Duration::ZERO, Duration::from_millis(30)] {
            endings.push(self.cut(event, hold).await?);
            sleep(self.pace.pause).await;
        }
        endings.push(self.whole(event).await?);
        Ok(endings)
    }

    /// Goes away when its time is over and tries again at once, while the first attempt is perhaps still at work.
    async fn slow(&self, event: &Event) -> anyhow::Result<Vec<Ending>> {
        let mut endings = Vec::new();
        for _ in 0..self.pace.copies.min(4) {
            let ending = self.cut(event, self.pace.timeout).await?;
            let refused = matches!(ending, Ending::Answered(_)) && !ending.is_acknowledged();
            let done = ending.is_acknowledged();
            endings.push(ending);
            if done {
                break;
            }
            if refused {
                sleep(self.pace.timeout).await;
            }
        }
        Ok(endings)
    }

    /// The same bytes, once the first have been answered and some time has passed.
    async fn replay(&self, event: &Event) -> anyhow::Result<Vec<Ending>> {
        let ready = self.maker.sign(event, Age::Now)?;
        let mut endings = vec![self.sender.whole(ready.clone()).await];
        self.persist(event, &mut endings).await?;
        sleep(self.pace.replay_after).await;
        for _ in 1..self.pace.copies.min(4) {
            endings.push(self.sender.whole(ready.clone()).await);
        }
        Ok(endings)
    }

    /// The same event, each copy with a signature of another second.
    async fn resigned(&self, event: &Event) -> anyhow::Result<Vec<Ending>> {
        let mut endings = Vec::new();
        for age in [Age::Seconds(3), Age::Seconds(2), Age::Seconds(1), Age::Now] {
            endings.push(self.sender.whole(self.maker.sign(event, age)?).await);
            self.persist(event, &mut endings).await?;
        }
        Ok(endings)
    }

    /// The event, then another body under its id, then the event again.
    async fn conflict(&self, event: &Event) -> anyhow::Result<Vec<Ending>> {
        let changed = self.maker.changed(event).context("this event has no id apart from its body")?;
        let mut endings = vec![self.whole(event).await?];
        self.persist(event, &mut endings).await?;
        // How the others are answered does not make the event acknowledged; it is by now, or never will be.
        for copy in [&changed, &changed, event] {
            endings.push(self.whole(copy).await?);
        }
        Ok(endings)
    }

    /// Every attempt of the provider's schedule; it hears none of the answers but the last.
    async fn schedule(&self, event: &Event) -> anyhow::Result<Vec<Ending>> {
        let began = Instant::now();
        let mut endings = Vec::new();
        let attempts = self.pace.schedule.len();
        for (number, due) in self.pace.schedule.iter().enumerate() {
            sleep_until(began + *due).await;
            let last = number + 1 == attempts;
            endings.push(match last {
                true => self.whole(event).await?,
                false => self.cut(event, Duration::from_millis(30)).await?,
            });
        }
        Ok(endings)
    }
}

/// The newest event first; then the copies of all, each lane in its own order.
async fn reordered(script: &Arc<Script>, events: Vec<Event>) -> anyhow::Result<Vec<Heard>> {
    let mut all: Vec<Heard> = Vec::new();
    for event in events.iter().rev() {
        let mut endings = vec![script.whole(event).await?];
        script.persist(event, &mut endings).await?;
        all.push(Heard { key: event.key().to_owned(), endings });
        script.progress.inc(1);
    }
    all.reverse();
    let events = Arc::new(events);
    let mut lanes = JoinSet::new();
    for lane in 0..LANES.min(script.pace.copies) {
        let (script, events) = (Arc::clone(script), Arc::clone(&events));
        lanes.spawn(async move {
            let mut endings = Vec::new();
            // A step that has no common divisor with the length visits all of them, in another order in each lane.
            let (count, step) = (events.len(), coprime(events.len(), lane + 2));
            for number in 0..count {
                let place = (lane + number * step) % count;
                if let Some(event) = events.get(place) {
                    endings.push((place, script.whole(event).await?));
                }
            }
            Ok::<_, anyhow::Error>(endings)
        });
    }
    while let Some(endings) = lanes.join_next().await {
        for (place, ending) in endings.context("a lane failed")?? {
            if let Some(heard) = all.get_mut(place) {
                heard.endings.push(ending);
            }
        }
    }
    Ok(all)
}

/// The first number from `at_least` on that has no divisor in common with `count`.
fn coprime(count: usize, at_least: usize) -> usize {
    fn divisor(a: usize, b: usize) -> usize {
        if b == 0 { a } else { divisor(b, a % b) }
    }
    (at_least..).find(|step| divisor(*step, count) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_visits_every_event() {
        for count in 1..40 {
            for lane in 0..LANES {
                let step = coprime(count, lane + 2);
                let visited: std::collections::BTreeSet<_> =
                    (0..count).map(|number| (lane + number * step) % count).collect();
                assert_eq!(visited.len(), count, "{count} events, step {step}");
            }
        }
    }
}
