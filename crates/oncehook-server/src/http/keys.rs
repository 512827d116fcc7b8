//! Keys that providers keep at an address: fetched over TLS, held for an hour, never from a private address.
//!
//! Promises: only addresses that the scheme has allowed are asked (fixed, or held to the provider's hosts by
//! `oncehook-verify`); https, no redirect, no proxy, no private or local address, written out or behind a name (`web`); every
//! call has a deadline and every answer a limit.
//!
//! A good key is never taken from genuine senders by forged requests or by an outage. It is fetched again in the background
//! before it is old, and used meanwhile; if that fails it is used for another day, unless the provider says that it is gone.
//! A key that has checked a genuine event is remembered over a restart (`remembered`), is the last to be forgotten, and may
//! always be fetched again. Forged requests cannot make the gateway hammer anybody: an address that failed is left alone for
//! a while, one answer with a set of keys serves every id that is asked for shortly afterwards, and calls in vain are counted
//! by peer and by source (`budget`). Each source has a ring of its own, so its forgeries cost no other source anything.
//!
//! Few requests of a source wait for a key at once, with few bytes; the others are asked to try again later.
//!
//! Does not: decide whether a request is genuine. A key that cannot be had is "try again later", never "accept".

mod budget;
mod remembered;
mod web;

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use oncehook::clock::Clock;
use oncehook::text::printable;
use oncehook_verify::{FetchedKey, KeyError, KeyRequest, UnixMicros, Verifier};
use tokio::sync::watch;

use self::budget::Budget;
use self::remembered::RememberedKey;
pub(super) use self::remembered::RememberedKeys;
pub(super) use self::web::WebFetcher;
use super::rate::network;

/// How long one call may take. Providers wait for three seconds and more.
const DEADLINE: Duration = Duration::from_millis(2_500);

/// How long a key is used before it is fetched again, in the background.
const FRESH: Duration = Duration::from_secs(45 * 60);

/// How long a key is used at most if it cannot be fetched again: its hour and a day.
const USABLE: Duration = Duration::from_secs(25 * 3_600);

/// How long after a failed attempt to fetch a good key again the next one comes.
const RETRY: Duration = Duration::from_secs(60);

/// How long an address that gave no key is left alone.
const SHUNNED: Duration = Duration::from_secs(15);

/// Keys held for a source; a provider has a handful.
const MAX_KEYS: usize = 256;

/// Requests of a source that wait for a key at once, and how many of them may come from one peer. Room for a burst of a genuine
/// sender while its first key is fetched.
const MAX_WAITING: usize = 256;
const MAX_WAITING_OF_PEER: usize = 128;

/// Something that is about to be known.
pub(super) type Fetching<'a, T> = Pin<Box<dyn Future<Output = Result<T, FetchFailed>> + Send + 'a>>;

/// Who gets keys from providers. The gateway has one that calls them; tests have others.
pub(super) trait KeyFetcher: Send + Sync {
    /// The provider's answer, byte for byte. `params` are the source's, for providers that want credentials.
    ///
    /// Dropped half-way, nothing has happened but a call.
    fn fetch<'a>(&'a self, request: &'a KeyRequest, params: &'a BTreeMap<String, String>) -> Fetching<'a, Vec<u8>>;

    /// Calls an address that confirms a subscription; an error unless the answer is a 2xx.
    fn confirm<'a>(&'a self, url: &'a str) -> Fetching<'a, ()>;
}

/// A call that led to nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub(super) struct FetchFailed {
    /// For the log.
    reason: String,
    /// The provider says that there is no such key.
    gone: bool,
}

impl FetchFailed {
    fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), gone: false }
    }
}

/// Why there is no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoKey {
    /// The provider did not answer, or must not be asked now: the sender must try again.
    Unavailable,
    /// The provider answered, and there is no usable key: the request is refused.
    Unusable,
}

/// A key that its provider has handed out.
pub(super) struct GoodKey {
    pub(super) key: FetchedKey,
    request: KeyRequest,
    answer: Arc<Vec<u8>>,
    fetched_at: UnixMicros,
    /// It has checked a genuine request.
    proven: AtomicBool,
}

/// The keys of one source at hand, and how to get more.
pub(super) struct KeyRing {
    source: String,
    verifier: Arc<Verifier>,
    params: BTreeMap<String, String>,
    fetcher: Arc<dyn KeyFetcher>,
    remembered: Arc<RememberedKeys>,
    clock: Clock,
    /// Bytes of the bodies of requests that wait for a key.
    max_waiting_bytes: usize,
    memory: Mutex<Memory>,
}

/// What earlier calls have brought, and what is under way.
struct Memory {
    good: HashMap<KeyRequest, Held>,
    /// Calls that led to nothing, and until when they are not made again. Bounded by the budget.
    failed: HashMap<KeyRequest, (NoKey, Instant)>,
    /// The latest answer, for a source whose keys come as a set, and until when it answers for every id.
    set: Option<(Arc<Vec<u8>>, Instant)>,
    /// Calls under way; a channel closes when its call has ended.
    calls: HashMap<KeyRequest, watch::Receiver<()>>,
    budget: Budget,
    waiting: Waiting,
}

struct Held {
    key: Arc<GoodKey>,
    refresh_at: Instant,
    until: Instant,
}

#[derive(Default)]
struct Waiting {
    bytes: usize,
    by_peer: HashMap<IpAddr, usize>,
}

/// What a ring is made of.
pub(super) struct KeySource {
    pub(super) name: String,
    pub(super) verifier: Arc<Verifier>,
    pub(super) params: BTreeMap<String, String>,
    pub(super) clock: Clock,
    pub(super) max_waiting_bytes: usize,
}

impl KeyRing {
    pub(super) fn new(source: KeySource, fetcher: Arc<dyn KeyFetcher>, remembered: Arc<RememberedKeys>) -> Arc<Self> {
        let KeySource { name, verifier, params, clock, max_waiting_bytes } = source;
        let now = Instant::now();
        let memory = Memory {
            good: HashMap::new(),
            failed: HashMap::new(),
            set: None,
            calls: HashMap::new(),
            budget: Budget::new(now),
            waiting: Waiting::default(),
        };
        let ring = Self {
            source: name,
            verifier,
            params,
            fetcher,
            remembered,
            clock,
            max_waiting_bytes,
            memory: Mutex::new(memory),
        };
        for key in ring.remembered.of(&ring.source) {
            ring.take_remembered(&key, now);
        }
        Arc::new(ring)
    }

    /// What can be said about a key without a call; nothing if one is due. A good key that is no longer fresh is fetched
    /// again in the background.
    pub(super) fn at_hand(self: &Arc<Self>, wanted: &KeyRequest) -> Option<Result<Arc<GoodKey>, NoKey>> {
        let now = Instant::now();
        let set = {
            let mut memory = self.memory();
            if let Some(held) = memory.good.get_mut(wanted).filter(|held| now < held.until) {
                let key = Arc::clone(&held.key);
                if held.refresh_at <= now {
                    held.refresh_at = now + RETRY;
                    let (_, call) = self.join_or_begin(&mut memory, wanted, None);
                    drop(memory);
                    call.into_iter().for_each(Call::run);
                }
                return Some(Ok(key));
            }
            let call = call_for(wanted);
            if let Some((reason, _)) = memory.failed.get(&call).filter(|(_, until)| now < *until) {
                return Some(Err(*reason));
            }
            let is_set = matches!(wanted, KeyRequest::KeySet { .. });
            let (answer, _) = memory.set.as_ref().filter(|(_, until)| is_set && now < *until)?;
            Arc::clone(answer)
        };
        // An id that the set lacks is not held: it costs nothing to look again, and anybody can invent ids.
        Some(match self.read(wanted, set) {
            Ok(key) => {
                self.memory().hold(Arc::clone(&key), now);
                Ok(key)
            }
            Err(_) => Err(NoKey::Unusable),
        })
    }

    /// Asks the provider for a key that is not [at hand](Self::at_hand), or waits for a call that is under way. `bytes` are
    /// held in memory meanwhile.
    pub(super) async fn fetch(
        self: &Arc<Self>,
        wanted: &KeyRequest,
        peer: IpAddr,
        bytes: usize,
    ) -> Result<Arc<GoodKey>, NoKey> {
        let peer = network(peer);
        let (mut called, call, _waiter) = {
            let mut memory = self.memory();
            if !memory.waiting.has_room(peer, bytes, self.max_waiting_bytes) {
                return Err(NoKey::Unavailable);
            }
            let payer = match memory.is_proven(wanted) || memory.calls.contains_key(&call_for(wanted)) {
                true => None,
                false if memory.budget.pay(&call_for(wanted), peer, Instant::now()) => Some(peer),
                false => return Err(NoKey::Unavailable),
            };
            let (called, call) = self.join_or_begin(&mut memory, wanted, payer);
            memory.waiting.add(peer, bytes);
            (called, call, Waiter { ring: Arc::clone(self), peer, bytes })
        };
        call.into_iter().for_each(Call::run);
        // The call has a deadline of its own. An error says that it has ended.
        let _ = called.changed().await;
        self.at_hand(wanted).unwrap_or(Err(NoKey::Unavailable))
    }

    /// The key has checked a genuine request.
    pub(super) fn prove(&self, key: &GoodKey) {
        if !key.proven.load(Ordering::Relaxed) && !key.proven.swap(true, Ordering::Relaxed) {
            self.remember(key);
        }
    }

    pub(super) async fn confirm(&self, url: &str) -> Result<(), FetchFailed> {
        in_time(self.fetcher.confirm(url)).await
    }

    /// The call for a key: one that is under way, or a new one, which the caller [runs](Call::run) once it has let go of the
    /// memory. `payer` is the peer who has paid for a new one.
    fn join_or_begin(
        self: &Arc<Self>,
        memory: &mut Memory,
        wanted: &KeyRequest,
        payer: Option<IpAddr>,
    ) -> (watch::Receiver<()>, Option<Call>) {
        let at = call_for(wanted);
        if let Some(called) = memory.calls.get(&at) {
            return (called.clone(), None);
        }
        let (ended, called) = watch::channel(());
        memory.calls.insert(at.clone(), called.clone());
        let call = Call { ring: Arc::clone(self), at, wanted: wanted.clone(), payer, _ended: ended };
        (called, Some(call))
    }

    /// Keeps what a call has brought.
    fn settle(&self, wanted: &KeyRequest, answer: Result<Vec<u8>, FetchFailed>, payer: Option<IpAddr>) {
        let (source, now) = (self.source.as_str(), Instant::now());
        // The address stands in a request that nobody has verified.
        let url = &*printable(wanted.url());
        let answer = answer.map(Arc::new);
        let key = answer.as_ref().ok().map(|answer| self.read(wanted, Arc::clone(answer)));
        let mut memory = self.memory();
        let known = memory.good.get(wanted).map(|held| Arc::clone(&held.key));
        if let (Ok(answer), KeyRequest::KeySet { .. }) = (&answer, wanted) {
            memory.set = Some((Arc::clone(answer), now + SHUNNED));
        }
        match (key, answer) {
            (Some(Ok(key)), _) => {
                if let Some(payer) = payer {
                    memory.budget.give_back(payer);
                }
                if known.is_some_and(|known| known.proven.load(Ordering::Relaxed)) {
                    key.proven.store(true, Ordering::Relaxed);
                    self.remember(&key);
                }
                memory.hold(key, now);
            }
            // The provider has answered: what it gives now is right, also where that is nothing.
            (Some(Err(error)), _) => {
                tracing::warn!(source, url, %error, "a provider's key cannot be used");
                memory.fail(wanted, NoKey::Unusable, now);
                self.forget(&mut memory, wanted);
            }
            (None, Err(FetchFailed { reason, gone })) => {
                memory.fail(wanted, NoKey::Unavailable, now);
                match known {
                    Some(_) if !gone => tracing::warn!(
                        source,
                        url,
                        error = reason,
                        "a provider's key could not be fetched again; the known one is used for a day at most"
                    ),
                    _ => tracing::warn!(source, url, error = reason, "a provider's key could not be fetched"),
                }
                if gone {
                    self.forget(&mut memory, wanted);
                }
            }
            (None, Ok(_)) => {}
        }
    }

    /// The key in an answer.
    fn read(&self, wanted: &KeyRequest, answer: Arc<Vec<u8>>) -> Result<Arc<GoodKey>, KeyError> {
        let key = self.verifier.read_key(wanted, &answer)?;
        let (fetched_at, proven) = (self.clock.now(), AtomicBool::new(false));
        Ok(Arc::new(GoodKey { key, request: wanted.clone(), answer, fetched_at, proven }))
    }

    fn remember(&self, key: &GoodKey) {
        let remembered = RememberedKey::new(&self.source, &key.request, &key.answer, key.fetched_at.0);
        if let Some(remembered) = remembered {
            self.remembered.put(remembered);
        }
    }

    fn forget(&self, memory: &mut Memory, wanted: &KeyRequest) {
        if memory.good.remove(wanted).is_some_and(|held| held.key.proven.load(Ordering::Relaxed)) {
            self.remembered.remove(&self.source, wanted);
        }
    }

    /// Uses a key from before the start for what is left of its time. It is fetched again with its first use.
    fn take_remembered(&self, remembered: &RememberedKey, now: Instant) {
        let age = self.clock.now().0.checked_sub(remembered.fetched_at).and_then(|age| u64::try_from(age).ok());
        let left = age.and_then(|age| USABLE.checked_sub(Duration::from_micros(age)));
        let request = remembered.request();
        let Some(left) = left else { return };
        let answer = Arc::new(remembered.answer.clone().into_bytes());
        let Ok(key) = self.verifier.read_key(&request, &answer) else { return };
        let key = GoodKey {
            key,
            request: request.clone(),
            answer,
            fetched_at: UnixMicros(remembered.fetched_at),
            proven: AtomicBool::new(true),
        };
        let held = Held { key: Arc::new(key), refresh_at: now, until: now + left };
        self.memory().good.insert(request, held);
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The call that brings a key: one for all ids where keys come as a set.
fn call_for(wanted: &KeyRequest) -> KeyRequest {
    match wanted {
        KeyRequest::KeySet { url, .. } => KeyRequest::KeySet { url: url.clone(), id: String::new() },
        one => one.clone(),
    }
}

async fn in_time<T>(call: Fetching<'_, T>) -> Result<T, FetchFailed> {
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(outcome) => outcome,
        Err(_) => Err(FetchFailed::new("no answer in time")),
    }
}

impl Memory {
    /// Keeps a good key. Room is made by forgetting what is over, then keys that have never checked anything, and proven
    /// ones only if nothing else is left: requests can name many addresses, but only genuine events prove a key.
    fn hold(&mut self, key: Arc<GoodKey>, now: Instant) {
        let is_proven = |held: &Held| held.key.proven.load(Ordering::Relaxed);
        if self.good.len() >= MAX_KEYS {
            self.good.retain(|_, held| now < held.until);
        }
        if self.good.len() >= MAX_KEYS {
            self.good.retain(|_, held| is_proven(held));
        }
        if self.good.len() >= MAX_KEYS {
            self.good.clear();
        }
        let request = key.request.clone();
        self.failed.remove(&request);
        self.good.insert(request, Held { key, refresh_at: now + FRESH, until: now + USABLE });
    }

    fn fail(&mut self, wanted: &KeyRequest, reason: NoKey, now: Instant) {
        self.failed.retain(|_, (_, until)| now < *until);
        // An id that a set lacks says nothing about the others in it.
        let is_set_without_key = reason == NoKey::Unusable && matches!(wanted, KeyRequest::KeySet { .. });
        if !is_set_without_key {
            self.failed.insert(call_for(wanted), (reason, now + SHUNNED));
        }
    }

    /// Has this key ever checked a genuine request? Then it may be fetched again whatever forgers have spent.
    fn is_proven(&self, wanted: &KeyRequest) -> bool {
        self.good.get(wanted).is_some_and(|held| held.key.proven.load(Ordering::Relaxed))
    }
}

impl Waiting {
    fn has_room(&self, peer: IpAddr, bytes: usize, max_bytes: usize) -> bool {
        self.by_peer.values().sum::<usize>() < MAX_WAITING
            && self.by_peer.get(&peer).is_none_or(|count| *count < MAX_WAITING_OF_PEER)
            && self.bytes + bytes <= max_bytes
    }

    fn add(&mut self, peer: IpAddr, bytes: usize) {
        *self.by_peer.entry(peer).or_insert(0) += 1;
        self.bytes += bytes;
    }

    fn remove(&mut self, peer: IpAddr, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
        if let Some(count) = self.by_peer.get_mut(&peer) {
            *count = count.saturating_sub(1);
        }
        self.by_peer.retain(|_, count| *count > 0);
    }
}

/// A request that waits for a key. Never dropped by somebody who holds the memory.
struct Waiter {
    ring: Arc<KeyRing>,
    peer: IpAddr,
    bytes: usize,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.ring.memory().waiting.remove(self.peer, self.bytes);
    }
}

/// A call under way. When it ends, however that comes about, those who wait for it look again. Never dropped by somebody
/// who holds the memory.
struct Call {
    ring: Arc<KeyRing>,
    at: KeyRequest,
    wanted: KeyRequest,
    payer: Option<IpAddr>,
    _ended: watch::Sender<()>,
}

impl Call {
    /// In a task of its own, so that a sender who hangs up cancels nothing.
    fn run(self) {
        tokio::spawn(async move {
            let answer = in_time(self.ring.fetcher.fetch(&self.wanted, &self.ring.params)).await;
            self.ring.settle(&self.wanted, answer, self.payer);
        });
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.ring.memory().calls.remove(&self.at);
    }
}

#[cfg(test)]
mod tests;
