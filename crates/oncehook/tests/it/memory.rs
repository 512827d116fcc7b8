//! The reference journal passes the suites that it defines.

use std::sync::Arc;

use oncehook::clock::Clock;
use oncehook::journal::memory::MemoryJournal;
use oncehook_testkit::deliveries::{compare_deliveries, exercise_deliveries, exercise_ordering};
use oncehook_testkit::journal::{NOW, Subject, exercise};

fn subject() -> Subject<MemoryJournal> {
    Subject { open: Box::new(|_, clock| Arc::new(MemoryJournal::with_clock(clock))), survives: false }
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_the_reference_behaves_like_a_journal() {
    exercise(&subject()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r14_r25_r27_r32_the_reference_keeps_the_promises_to_workers_and_operators() {
    exercise_deliveries(&subject()).await;
}

/// Whatever differs between two runs of the reference, be it by chance or by the order of a map, is no behaviour that
/// another journal could share.
#[tokio::test(flavor = "multi_thread")]
async fn r14_random_histories_of_work_end_in_the_reference_as_in_the_reference() {
    for seed in 1..=20 {
        let clock = Clock::manual(NOW);
        let journal = MemoryJournal::with_clock(clock.clone());
        compare_deliveries(&journal, &clock, seed, 1_000).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r24_r29_r30_the_reference_keeps_the_lines_of_entities() {
    exercise_ordering(&subject()).await;
}
