//! The reference journal passes the suite that it defines.

use std::sync::Arc;

use oncehook::journal::memory::MemoryJournal;
use oncehook_testkit::journal::{Subject, exercise};

#[tokio::test(flavor = "multi_thread")]
async fn r12_the_reference_behaves_like_a_journal() {
    let subject = Subject { open: Box::new(|_, _| Arc::new(MemoryJournal::new())), survives: false };
    exercise(&subject).await;
}
