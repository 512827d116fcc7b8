//! Processes that must not outlive this one.
//!
//! Promises: whoever was [held](hold) and not [released](release) is killed by [`cut`], frozen or not. Gateways are held from
//! their start to their end. Servers of databases are not: a small shell ends each of them when this process is gone.
//!
//! Does not: act by itself. Dropping a process ends it as it always did; this is for ends that drop nothing, such as Ctrl-C.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

static HELD: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn held() -> MutexGuard<'static, BTreeSet<u32>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process goes when we go.
pub fn hold(pid: u32) {
    held().insert(pid);
}

/// This process has ended: its number may soon be somebody else's.
pub fn release(pid: u32) {
    held().remove(&pid);
}

/// Kills all that are held. Returns how many they were. Nobody can start one more: there would be no place to hold it.
pub fn cut() -> usize {
    let held = held();
    for pid in held.iter() {
        let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
    }
    let count = held.len();
    std::mem::forget(held);
    count
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    /// Alone in a process of its own, because nothing can be held afterwards.
    #[test]
    fn r47_whoever_is_held_is_killed_even_frozen_and_whoever_was_released_is_not() {
        if std::env::args().any(|word| word == "--exact") {
            let mut children = [1, 2].map(|_| Command::new("sleep").arg("60").spawn().unwrap());
            children.iter().for_each(|child| super::hold(child.id()));
            super::release(children[1].id());
            let stop = ["-STOP", &children[0].id().to_string()];
            assert!(Command::new("kill").args(stop).status().unwrap().success());
            assert_eq!(super::cut(), 1);
            assert_eq!(children[0].wait().unwrap().signal(), Some(9));
            assert_eq!(children[1].try_wait().unwrap(), None);
            children[1].kill().unwrap();
            children[1].wait().unwrap();
            return;
        }
        let name = "leash::tests::r47_whoever_is_held_is_killed_even_frozen_and_whoever_was_released_is_not";
        let alone = Command::new(std::env::current_exe().unwrap()).args(["--exact", name]).output().unwrap();
        let said = String::from_utf8_lossy(&alone.stdout);
        assert!(alone.status.success() && said.contains("1 passed"), "{said}");
    }
}
