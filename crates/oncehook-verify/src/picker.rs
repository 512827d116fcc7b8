//! Picking values out of a JSON body, for whoever handles an event.
//!
//! Promises: one pass, nothing built, what is found is borrowed from the body as JSON text. A name that occurs twice on
//! a wanted path makes the document ambiguous, as everywhere in this crate: nobody is handed one of two answers.

use smallvec::SmallVec;

use crate::extract::{Plan, Slot};
use crate::pointer::Pointer;

/// A set of wanted JSON pointers.
#[derive(Debug, Clone)]
pub struct Picker {
    plan: Plan,
    slots: Vec<Slot>,
}

/// The document says two things about a wanted value, or is not JSON up to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the body is ambiguous or not readable as JSON on a wanted path")]
pub struct Ambiguous;

impl Picker {
    /// Wants these pointers (`/a/b`), in this order. The error says what is wrong with one of them.
    pub fn new<S: AsRef<str>>(pointers: &[S]) -> Result<Self, String> {
        let mut plan = Plan::new();
        let slots = pointers
            .iter()
            .map(|pointer| plan.add(&Pointer::parse(pointer.as_ref())?))
            .collect::<Result<Vec<_>, String>>()?;
        Ok(Self { plan, slots })
    }

    /// The JSON text of each wanted value, in the order they were asked for; `None` where the body has nothing there.
    pub fn pick<'b>(&self, body: &'b [u8]) -> Result<SmallVec<[Option<&'b str>; 8]>, Ambiguous> {
        let found = self.plan.walk(body);
        if found.is_ambiguous() {
            return Err(Ambiguous);
        }
        Ok(self.slots.iter().map(|slot| found.raw(*slot)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_in_the_order_asked() {
        let picker = Picker::new(&["/b", "/a/c", "/none", "/list/1"]).unwrap();
        let body = br#"{"a":{"c": "x\n"},"b":{"d":[1,2]},"list":[1,2.50]}"#;
        let found = picker.pick(body).unwrap();
        assert_eq!(found.as_slice(), [Some(r#"{"d":[1,2]}"#), Some(r#""x\n""#), None, Some("2.50")]);
    }

    #[test]
    fn two_answers_are_none() {
        let picker = Picker::new(&["/a"]).unwrap();
        assert_eq!(picker.pick(br#"{"a":1,"a":2}"#), Err(Ambiguous));
        assert!(Picker::new(&["a"]).is_err());
    }
}
