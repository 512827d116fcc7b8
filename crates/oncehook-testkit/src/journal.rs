//! The behaviour of every journal. A backend passes [`exercise`] whole, or it is not a backend.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncehook::clock::Clock;
use oncehook::event::{EventIds, NewEvent, NewEvents, SourceName};
use oncehook::journal::{
    Alias, AppendError, Appended, CONFLICTS_KEPT, DUPLICATES_REMEMBERED, EventQuery, EventStatus, EventSummary, Flag,
    Journal, JournalReader, Layer, Receipt, RecentKey, Verdict,
};
use oncehook_verify::{EventKey, Integrity, Quarantine, UnixMicros, digest};

/// A time to start from.
pub const NOW: UnixMicros = UnixMicros(1_790_000_000_000_000);

/// Opens a journal in a directory, again if it is there already, with the time from a clock.
pub type Open<J> = Box<dyn Fn(&Path, Clock) -> Arc<J>>;

/// A backend under test.
pub struct Subject<J> {
    /// How to open it.
    pub open: Open<J>,
    /// Whether what was stored is there after closing and opening again.
    pub survives: bool,
}

/// One journal in use by one behaviour.
pub(crate) struct Case<J> {
    pub(crate) journal: Arc<J>,
    pub(crate) clock: Clock,
    pub(crate) directory: tempfile::TempDir,
}

/// Runs every behaviour, each on a journal of its own.
pub async fn exercise<J: Journal + JournalReader>(subject: &Subject<J>) {
    run(subject, the_first_is_new_and_the_rest_are_duplicates).await;
    run(subject, keys_are_scoped_to_their_source).await;
    run(subject, keys_are_compared_byte_by_byte).await;
    run(subject, another_body_is_a_conflict_and_the_first_stays).await;
    run(subject, different_bodies_are_kept_up_to_a_limit).await;
    run(subject, racing_copies_give_one_event).await;
    run(subject, events_of_a_request_are_stored_together).await;
    run(subject, a_dropped_ticket_cancels_nothing).await;
    run(subject, quarantined_events_are_stored_and_marked).await;
    run(subject, the_same_body_under_an_unsigned_key_is_a_suspected_replay).await;
    run(subject, a_replay_that_the_front_door_has_seen_is_held_and_flagged).await;
    run(subject, duplicates_are_counted_and_the_latest_remembered).await;
    run(subject, duplicates_recognised_elsewhere_are_counted_like_the_journals_own).await;
    run(subject, lists_filter_and_page).await;
    run(subject, the_keys_that_came_last_are_told).await;
    run(subject, an_id_that_was_answered_before_the_journal_stays_valid).await;
    run(subject, the_self_test_passes_and_leaves_nothing).await;
    run(subject, a_closed_journal_refuses).await;
    if subject.survives {
        what_was_stored_is_there_after_reopening(subject).await;
        ids_grow_even_if_the_clock_was_set_back(subject).await;
    }
}

pub(crate) async fn run<J, F>(subject: &Subject<J>, behaviour: impl Fn(Case<J>) -> F)
where
    F: Future<Output = ()>,
{
    let directory = tempfile::tempdir().unwrap();
    let clock = Clock::manual(NOW);
    let journal = (subject.open)(directory.path(), clock.clone());
    // A journal that never answers must fail its test, not hang it.
    let deadline = Duration::from_secs(60);
    if tokio::time::timeout(deadline, behaviour(Case { journal, clock, directory })).await.is_err() {
        panic!("no answer within {deadline:?}: {}", std::any::type_name_of_val(&behaviour));
    }
}

/// An event of source `shop` with a key and a body.
#[must_use]
pub fn event(key: &str, body: &str) -> NewEvent {
    NewEvent {
        id: None,
        source: SourceName::new("shop").unwrap(),
        key: EventKey::from_parts(&[key.as_bytes()]),
        key_signed: true,
        kind: Some("order.paid".to_owned()),
        entity: Some(format!("order-{key}")),
        occurred_at: Some(UnixMicros(NOW.0 - 1_000_000)),
        version: None,
        received_at: NOW,
        expires_at: UnixMicros(NOW.0 + 1_000_000),
        integrity: Integrity::Body,
        headers: Bytes::from_static(b"content-type: application/json\n"),
        body: Bytes::from(body.to_owned()),
        digest: digest(body.as_bytes()),
        quarantine: None,
        routes: Default::default(),
        by_entity: false,
        peer: [192, 0, 2, 1].into(),
    }
}

/// Appends the events of one request and waits for the receipt.
pub async fn append(journal: &impl Journal, events: impl IntoIterator<Item = NewEvent>) -> Receipt {
    try_append(journal, events).await.unwrap()
}

/// Appends and returns what became of it.
pub async fn try_append(
    journal: &impl Journal,
    events: impl IntoIterator<Item = NewEvent>,
) -> Result<Receipt, AppendError> {
    journal.submit(events.into_iter().collect::<NewEvents>())?.await.unwrap()
}

pub(crate) async fn append_one(journal: &impl Journal, event: NewEvent) -> Appended {
    let receipt = append(journal, [event]).await;
    assert_eq!(receipt.len(), 1);
    receipt[0]
}

async fn all(journal: &impl JournalReader) -> Vec<EventSummary> {
    find(journal, EventQuery::default()).await
}

async fn find(journal: &impl JournalReader, query: EventQuery) -> Vec<EventSummary> {
    let page = journal.list(EventQuery { limit: 1_000, ..query }).await.unwrap();
    assert_eq!(page.next, None);
    page.events
}

async fn the_first_is_new_and_the_rest_are_duplicates<J: Journal + JournalReader>(case: Case<J>) {
    let body = "{\"id\":\"evt_1\", \"odd\":\"\u{0}\u{fffd} spacing\"  }";
    let first = append_one(&*case.journal, event("evt_1", body)).await;
    assert_eq!(first.verdict, Verdict::New);
    for _ in 0..3 {
        let again = append_one(&*case.journal, event("evt_1", body)).await;
        assert_eq!(again, Appended { verdict: Verdict::Duplicate, ..first });
    }
    let events = all(&*case.journal).await;
    assert_eq!(events.len(), 1);
    let stored = &events[0];
    assert_eq!(stored.id, first.id);
    assert_eq!((stored.source.as_str(), stored.key.as_bytes()), ("shop", &b"evt_1"[..]));
    assert_eq!((stored.kind.as_deref(), stored.entity.as_deref()), (Some("order.paid"), Some("order-evt_1")));
    assert_eq!((stored.status, stored.flags.as_slice()), (EventStatus::Unrouted, &[][..]));
    assert_eq!((stored.received_at, stored.occurred_at), (NOW, Some(UnixMicros(NOW.0 - 1_000_000))));
    assert_eq!((stored.size, stored.duplicates), (body.len() as u64, 3));
    let kept = case.journal.body(first.id).await.unwrap().unwrap();
    assert_eq!((&kept.body[..], &kept.headers[..]), (body.as_bytes(), &b"content-type: application/json\n"[..]));
}

async fn keys_are_scoped_to_their_source<J: Journal + JournalReader>(case: Case<J>) {
    let other = NewEvent { source: SourceName::new("bank").unwrap(), ..event("evt_1", "{}") };
    let first = append_one(&*case.journal, event("evt_1", "{}")).await;
    let second = append_one(&*case.journal, other).await;
    assert_eq!((first.verdict, second.verdict), (Verdict::New, Verdict::New));
    assert_ne!(first.id, second.id);
    let query = EventQuery { key: Some(EventKey::from_parts(&[b"evt_1"])), ..Default::default() };
    assert_eq!(find(&*case.journal, query).await.len(), 2);
}

async fn keys_are_compared_byte_by_byte<J: Journal + JournalReader>(case: Case<J>) {
    let long = "k".repeat(65_536);
    let longer = format!("{long}!");
    let keys = [
        "evt_a",
        "EVT_A",
        "evt_a ",
        " evt_a",
        "evt_\u{e9}",
        "evt_e\u{301}",
        "evt\u{0}a",
        "evt\u{0}b",
        "ﬁ",
        "fi",
        "ß",
        "ss",
        "'; DROP TABLE oncehook_keys; --",
        "*3\r\n$3\r\nSET\r\n",
        &long,
        &longer,
    ];
    for key in keys {
        let stored = append_one(&*case.journal, NewEvent { entity: None, ..event(key, "{}") }).await;
        assert_eq!(stored.verdict, Verdict::New, "{:?}", key.get(..10));
    }
    assert_eq!(all(&*case.journal).await.len(), keys.len());
    for key in keys {
        let query = EventQuery { key: Some(EventKey::from_parts(&[key.as_bytes()])), ..Default::default() };
        assert_eq!(find(&*case.journal, query).await.len(), 1, "{:?}", key.get(..10));
    }
}

async fn another_body_is_a_conflict_and_the_first_stays<J: Journal + JournalReader>(case: Case<J>) {
    let first = append_one(&*case.journal, event("evt_1", "{\"amount\":1}")).await;
    let other = append_one(&*case.journal, event("evt_1", "{\"amount\":1000000}")).await;
    assert_eq!(other, Appended { verdict: Verdict::Conflict, ..first });
    append_one(&*case.journal, event("evt_1", "{\"amount\":1000000}")).await;
    let again = append_one(&*case.journal, event("evt_1", "{\"amount\":1}")).await;
    assert_eq!(again.verdict, Verdict::Duplicate);

    let detail = case.journal.show(first.id).await.unwrap().unwrap();
    assert_eq!(detail.event.flags, [Flag::Conflict]);
    assert_eq!((detail.event.duplicates, detail.event.status), (1, EventStatus::Unrouted));
    assert_eq!(detail.conflicts.len(), 1);
    assert_eq!((detail.conflicts[0].count, detail.conflicts[0].size), (2, 18));
    assert_eq!(detail.conflicts[0].digest, Some(digest(b"{\"amount\":1000000}")));
    assert_eq!(&case.journal.body(first.id).await.unwrap().unwrap().body[..], b"{\"amount\":1}");
    let stats = case.journal.stats().await.unwrap();
    let counts = &stats.sources[0];
    assert_eq!((counts.events, counts.duplicates, counts.conflicts), (1, 1, 2));
}

async fn different_bodies_are_kept_up_to_a_limit<J: Journal + JournalReader>(case: Case<J>) {
    let first = append_one(&*case.journal, event("evt_1", "first")).await;
    for _ in 0..2 {
        for body in 0..20 {
            let other = append_one(&*case.journal, event("evt_1", &format!("body {body:02}"))).await;
            assert_eq!(other, Appended { verdict: Verdict::Conflict, ..first });
        }
    }
    let conflicts = case.journal.show(first.id).await.unwrap().unwrap().conflicts;
    let kept = conflicts.iter().filter(|conflict| conflict.digest.is_some());
    assert_eq!(kept.clone().count(), CONFLICTS_KEPT);
    assert!(kept.clone().all(|conflict| conflict.count == 2 && conflict.size == 7));
    let beyond = conflicts.iter().find(|conflict| conflict.digest.is_none()).unwrap();
    assert_eq!((beyond.count, beyond.size), (2 * (20 - CONFLICTS_KEPT as u64), 0));
}

async fn racing_copies_give_one_event<J: Journal + JournalReader>(case: Case<J>) {
    let copies = (0..1_000).map(|_| {
        let journal = Arc::clone(&case.journal);
        tokio::spawn(async move { append_one(&*journal, event("evt_1", "{}")).await })
    });
    let mut fates = Vec::new();
    for copy in copies.collect::<Vec<_>>() {
        fates.push(copy.await.unwrap());
    }
    assert_eq!(fates.iter().filter(|fate| fate.verdict == Verdict::New).count(), 1);
    assert!(fates.iter().all(|fate| fate.id == fates[0].id));
    let events = all(&*case.journal).await;
    assert_eq!((events.len(), events[0].duplicates), (1, 999));
}

async fn events_of_a_request_are_stored_together<J: Journal + JournalReader>(case: Case<J>) {
    append_one(&*case.journal, event("b", "{}")).await;
    let request = ["a", "b", "c", "a"].map(|key| event(key, "{}"));
    let receipt = append(&*case.journal, request).await;
    let verdicts: Vec<_> = receipt.iter().map(|appended| appended.verdict).collect();
    assert_eq!(verdicts, [Verdict::New, Verdict::Duplicate, Verdict::New, Verdict::Duplicate]);
    assert_eq!(receipt[0].id, receipt[3].id);
    assert!(receipt[2].id > receipt[0].id, "later in the request is later in the journal");
    assert_eq!(all(&*case.journal).await.len(), 3);
}

async fn a_dropped_ticket_cancels_nothing<J: Journal + JournalReader>(case: Case<J>) {
    for number in 0..500 {
        drop(case.journal.submit([event(&format!("evt_{number}"), "{}")].into_iter().collect()).unwrap());
    }
    append_one(&*case.journal, event("last", "{}")).await;
    // A journal with several queues may still be storing some of them.
    let mut stored = 0;
    for _ in 0..200 {
        stored = all(&*case.journal).await.len();
        if stored == 501 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(stored, 501);
}

async fn quarantined_events_are_stored_and_marked<J: Journal + JournalReader>(case: Case<J>) {
    let held = NewEvent { quarantine: Some(Quarantine::AmbiguousJson), ..event("evt_1", "{}") };
    let first = append_one(&*case.journal, held.clone()).await;
    assert_eq!(first.verdict, Verdict::Quarantined);
    assert_eq!(append_one(&*case.journal, held).await, Appended { verdict: Verdict::Duplicate, ..first });
    append_one(&*case.journal, event("evt_2", "{}")).await;
    let query = EventQuery { status: Some(EventStatus::Quarantined), ..Default::default() };
    let found = find(&*case.journal, query).await;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].id, found[0].flags.as_slice()), (first.id, &[Flag::Quarantined][..]));
    assert_eq!(case.journal.stats().await.unwrap().sources[0].quarantined, 1);
}

async fn the_same_body_under_an_unsigned_key_is_a_suspected_replay<J: Journal + JournalReader>(case: Case<J>) {
    let unsigned = |key: &str, body: &str| NewEvent { key_signed: false, ..event(key, body) };
    let elsewhere = NewEvent { source: SourceName::new("bank").unwrap(), ..unsigned("x", "same") };
    append(&*case.journal, [unsigned("first", "same"), unsigned("other", "different"), elsewhere]).await;
    append_one(&*case.journal, event("signed", "same")).await;
    let replay = append_one(&*case.journal, unsigned("replay", "same")).await;
    assert_eq!(replay.verdict, Verdict::New, "it is flagged, not refused");
    // The flag may come a moment later.
    let mut flagged = Vec::new();
    for _ in 0..200 {
        flagged = all(&*case.journal).await;
        flagged.retain(|event| event.flags.contains(&Flag::SuspectedReplay));
        if !flagged.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(flagged.iter().map(|event| event.id).collect::<Vec<_>>(), [replay.id]);
}

async fn a_replay_that_the_front_door_has_seen_is_held_and_flagged<J: Journal + JournalReader>(case: Case<J>) {
    for key_signed in [true, false] {
        let quarantine = Some(Quarantine::SuspectedReplay);
        let key = format!("replay-{key_signed}");
        let replay = NewEvent { quarantine, key_signed, ..event(&key, &key) };
        let appended = append_one(&*case.journal, replay).await;
        assert_eq!(appended.verdict, Verdict::Quarantined);
        let mut flags = case.journal.show(appended.id).await.unwrap().unwrap().event.flags;
        flags.sort_unstable_by_key(|flag| flag.as_str());
        assert_eq!(flags, [Flag::Quarantined, Flag::SuspectedReplay], "key_signed = {key_signed}");
    }
}

async fn duplicates_are_counted_and_the_latest_remembered<J: Journal + JournalReader>(case: Case<J>) {
    let first = append_one(&*case.journal, event("evt_1", "{}")).await;
    for number in 0..20_u8 {
        let at = UnixMicros(NOW.0 + i64::from(number));
        append_one(
            &*case.journal,
            NewEvent { received_at: at, peer: [192, 0, 2, number].into(), ..event("evt_1", "{}") },
        )
        .await;
        if number == 10 {
            // Let a flush come between, where there is one.
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
    }
    let detail = case.journal.show(first.id).await.unwrap().unwrap();
    assert_eq!(detail.event.duplicates, 20);
    assert_eq!(detail.duplicates_seen, Some((NOW, UnixMicros(NOW.0 + 19))));
    let peers: Vec<_> = detail.duplicates_latest.iter().map(|seen| seen.peer.to_string()).collect();
    assert_eq!(peers.len(), DUPLICATES_REMEMBERED);
    assert_eq!((peers[0].as_str(), peers[7].as_str()), ("192.0.2.12", "192.0.2.19"));
    assert_eq!(case.journal.stats().await.unwrap().sources[0].duplicates, 20);
}

async fn duplicates_recognised_elsewhere_are_counted_like_the_journals_own<J: Journal + JournalReader>(case: Case<J>) {
    let first = append_one(&*case.journal, event("evt_1", "{}")).await;
    let shop = event("evt_1", "{}").source;
    for number in 0..20_u8 {
        let (at, peer) = (UnixMicros(NOW.0 + i64::from(number)), [192, 0, 2, number].into());
        if number % 2 == 0 {
            let layer = if number % 4 == 0 { Layer::Redis } else { Layer::Memory };
            assert!(case.journal.note_duplicate(first.id, &shop, at, peer, layer));
        } else {
            append_one(&*case.journal, NewEvent { received_at: at, peer, ..event("evt_1", "{}") }).await;
        }
        if number == 10 {
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
    }
    let detail = case.journal.show(first.id).await.unwrap().unwrap();
    assert_eq!(detail.event.duplicates, 20);
    assert_eq!(detail.duplicates_seen, Some((NOW, UnixMicros(NOW.0 + 19))));
    let peers: Vec<_> = detail.duplicates_latest.iter().map(|seen| seen.peer.to_string()).collect();
    assert_eq!((peers[0].as_str(), peers[7].as_str()), ("192.0.2.12", "192.0.2.19"));
    assert_eq!(case.journal.stats().await.unwrap().sources[0].duplicates, 20);
}

async fn the_keys_that_came_last_are_told<J: Journal + JournalReader>(case: Case<J>) {
    assert_eq!(case.journal.recent_keys(10).await.unwrap(), []);
    let mut expected = Vec::new();
    for number in 0..20_u8 {
        let key = format!("evt_{number}");
        let appended = append_one(&*case.journal, event(&key, &key)).await;
        // Neither a copy nor another body is a key of its own.
        append_one(&*case.journal, event(&key, &key)).await;
        append_one(&*case.journal, event(&key, "another")).await;
        let NewEvent { source, key, digest, expires_at, .. } = event(&key, &key);
        let source = source.as_str().to_owned();
        expected.push(RecentKey { source, key, event: appended.id, digest, expires_at });
    }
    expected.reverse();
    assert_eq!(case.journal.recent_keys(100).await.unwrap(), expected);
    assert_eq!(case.journal.recent_keys(7).await.unwrap(), expected[..7], "the latest first");
}

async fn lists_filter_and_page<J: Journal + JournalReader>(case: Case<J>) {
    let mut ids = Vec::new();
    for number in 0..50_i64 {
        let at = UnixMicros(NOW.0 + number * 1_000_000);
        case.clock.set(at);
        let event = NewEvent {
            source: SourceName::new(if number % 5 == 0 { "bank" } else { "shop" }).unwrap(),
            kind: (number % 7 != 0).then(|| format!("type-{}", number % 3)),
            entity: (number % 2 == 0).then(|| format!("entity-{}", number % 4)),
            received_at: at,
            ..event(&format!("evt_{number}"), "{}")
        };
        ids.push(append_one(&*case.journal, event).await.id);
    }
    let expect = async |query: EventQuery, wanted: &dyn Fn(i64) -> bool| {
        let found: Vec<_> = find(&*case.journal, query.clone()).await.into_iter().map(|event| event.id).collect();
        let wanted: Vec<_> =
            (0..50).rev().filter(|number| wanted(*number)).map(|number| ids[number as usize]).collect();
        assert_eq!(found, wanted, "{query:?}");
    };
    let text = |text: &str| Some(text.to_owned());
    // Twice: before and after the search index has caught up, where there is one.
    for round in 0..2 {
        expect(EventQuery::default(), &|_| true).await;
        expect(EventQuery { source: text("bank"), ..Default::default() }, &|n| n % 5 == 0).await;
        expect(EventQuery { source: text("nobody"), ..Default::default() }, &|_| false).await;
        expect(EventQuery { kind: text("type-1"), ..Default::default() }, &|n| n % 7 != 0 && n % 3 == 1).await;
        expect(EventQuery { entity: text("entity-2"), ..Default::default() }, &|n| n % 4 == 2).await;
        expect(
            EventQuery { entity: text("entity-2"), kind: text("type-1"), source: text("shop"), ..Default::default() },
            &|n| n % 4 == 2 && n % 3 == 1 && n % 7 != 0 && n % 5 != 0,
        )
        .await;
        let second = |n: i64| Some(UnixMicros(NOW.0 + n * 1_000_000));
        expect(EventQuery { since: second(10), until: second(20), ..Default::default() }, &|n| (10..20).contains(&n))
            .await;
        expect(EventQuery { since: second(10), source: text("bank"), ..Default::default() }, &|n| {
            n >= 10 && n % 5 == 0
        })
        .await;
        let key = Some(EventKey::from_parts(&[b"evt_9"]));
        expect(EventQuery { key: key.clone(), ..Default::default() }, &|n| n == 9).await;
        expect(EventQuery { key, source: text("bank"), ..Default::default() }, &|_| false).await;
        for source in [None, text("shop")] {
            let mut seen = Vec::new();
            let mut after = None;
            loop {
                let query = EventQuery { source: source.clone(), after, limit: 7, ..Default::default() };
                let page = case.journal.list(query).await.unwrap();
                assert!(page.events.len() <= 7);
                seen.extend(page.events.iter().map(|event| event.id));
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            let wanted = (0..50).rev().filter(|n| source.is_none() || n % 5 != 0).map(|n| ids[n as usize]);
            assert_eq!(seen, wanted.collect::<Vec<_>>());
        }
        if round == 0 {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
    assert!(case.journal.show(ids[0]).await.unwrap().is_some());
    let nobody = "00000000-0000-7000-8000-000000000000".parse().unwrap();
    assert!(case.journal.show(nobody).await.unwrap().is_none());
    assert!(case.journal.body(nobody).await.unwrap().is_none());
}

async fn the_self_test_passes_and_leaves_nothing<J: Journal + JournalReader>(case: Case<J>) {
    append_one(&*case.journal, event("evt_1", "{}")).await;
    for _ in 0..3 {
        case.journal.self_test().await.unwrap();
    }
    assert_eq!(all(&*case.journal).await.len(), 1);
    let stats = case.journal.stats().await.unwrap();
    assert_eq!(stats.sources.len(), 1);
    assert_eq!((stats.sources[0].events, stats.sources[0].duplicates, stats.sources[0].conflicts), (1, 0, 0));
}

async fn a_closed_journal_refuses<J: Journal + JournalReader>(case: Case<J>) {
    append_one(&*case.journal, event("evt_1", "{}")).await;
    // Somebody goes on sending all the while: each append is stored or refused, none is left waiting.
    let journal = Arc::clone(&case.journal);
    let sending = tokio::spawn(async move {
        for number in 0.. {
            match try_append(&*journal, [event(&format!("busy_{number}"), "{}")]).await {
                Ok(_) => {}
                Err(error) => return error,
            }
        }
        unreachable!()
    });
    case.journal.close().await;
    assert_eq!(sending.await.unwrap(), AppendError::Closed);
    assert_eq!(try_append(&*case.journal, [event("evt_2", "{}")]).await, Err(AppendError::Closed));
    drop(case.directory);
}

/// An intake has told senders its own ids. Each leads to an event, whether the journal kept the id or not, and however often
/// the intake brings the event.
async fn an_id_that_was_answered_before_the_journal_stays_valid<J: Journal + JournalReader>(case: Case<J>) {
    let journal = &*case.journal;
    let mut ids = EventIds::above(0, 7);
    let first = append_one(journal, event("held_by_another", "{}")).await;
    for key in ["evt_1", "evt_2", "held_by_another"] {
        let told = ids.next(NOW);
        let spooled = NewEvent { id: Some(told), ..event(key, "{}") };
        let mut stored = Vec::new();
        for _ in 0..2 {
            let appended = append_one(journal, spooled.clone()).await;
            if appended.id != told {
                let alias = Alias { alias: told, event: appended.id };
                // Twice, as after a crash in between.
                journal.keep_aliases(vec![alias]).await.unwrap();
                journal.keep_aliases(vec![alias]).await.unwrap();
                assert_eq!(journal.resolve(told).await.unwrap(), Some(appended.id), "{key}");
                assert!(journal.show(told).await.unwrap().is_none(), "{key} has two names and is shown under one");
            }
            let shown = journal.show(appended.id).await.unwrap().unwrap();
            assert_eq!(shown.event.key.display(), key);
            stored.push(appended.id);
        }
        assert_eq!(stored[0], stored[1], "{key}");
        let copy = append_one(journal, event(key, "{}")).await;
        assert_eq!((copy.id, copy.verdict), (stored[0], Verdict::Duplicate));
    }
    assert_eq!(journal.resolve(first.id).await.unwrap(), None, "an event's own id is no alias");
    assert_eq!(journal.resolve(ids.next(NOW)).await.unwrap(), None);
    assert_eq!(all(journal).await.len(), 3);
}

async fn what_was_stored_is_there_after_reopening<J: Journal + JournalReader>(subject: &Subject<J>) {
    let directory = tempfile::tempdir().unwrap();
    let clock = Clock::manual(NOW);
    let journal = (subject.open)(directory.path(), clock.clone());
    let first = append_one(&*journal, event("evt_1", "{}")).await;
    append(&*journal, (0..5).map(|_| event("evt_1", "{}"))).await;
    // Submitted but not waited for: closing must store them all the same.
    for number in 0..300 {
        drop(journal.submit([event(&format!("late_{number}"), "{}")].into_iter().collect()).unwrap());
    }
    journal.close().await;
    drop(journal);

    let journal = (subject.open)(directory.path(), clock);
    let again = append_one(&*journal, event("evt_1", "{}")).await;
    assert_eq!(again, Appended { verdict: Verdict::Duplicate, ..first });
    let conflict = append_one(&*journal, event("evt_1", "{ }")).await;
    assert_eq!(conflict, Appended { verdict: Verdict::Conflict, ..first });
    assert_eq!(all(&*journal).await.len(), 301);
    let detail = journal.show(first.id).await.unwrap().unwrap();
    assert_eq!((detail.event.duplicates, detail.conflicts.len()), (6, 1));
    journal.close().await;
}

async fn ids_grow_even_if_the_clock_was_set_back<J: Journal + JournalReader>(subject: &Subject<J>) {
    let directory = tempfile::tempdir().unwrap();
    let journal = (subject.open)(directory.path(), Clock::manual(NOW));
    let late = append_one(&*journal, event("late", "{}")).await;
    journal.close().await;
    drop(journal);
    let day_before = UnixMicros(NOW.0 - 86_400_000_000);
    let journal = (subject.open)(directory.path(), Clock::manual(day_before));
    let early = append_one(&*journal, NewEvent { received_at: day_before, ..event("early", "{}") }).await;
    assert!(early.id.sequence() > late.id.sequence());
    let query = EventQuery { until: Some(NOW), ..Default::default() };
    assert_eq!(find(&*journal, query).await.len(), 1);
    journal.close().await;
}
