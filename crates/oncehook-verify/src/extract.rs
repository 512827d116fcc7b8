//! Picking a few values out of a JSON body, in one pass and without building a tree.
//!
//! A [`Plan`] is the set of wanted pointers, merged into a trie. Walking a document follows the trie where the
//! document does and skips everything else without recursion, so nesting depth and size elsewhere cost
//! nothing but the reading. What is found is borrowed from the body.
//!
//! Parsers disagree about repeated names: some take the first, some the last. A name that occurs twice on
//! a wanted path therefore makes the whole document ambiguous, as does a wanted value that cannot be
//! read. The walk does not interpret values beyond that.

use std::{borrow::Cow, fmt};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use smallvec::SmallVec;

use crate::pointer::Pointer;

/// The wanted pointers as a trie. Slots number the distinct pointers in the order they were added.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    nodes: Vec<Node>,
    slots: usize,
}

/// The place of a wanted value in what was extracted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot(usize);

#[derive(Debug, Clone, Default)]
struct Node {
    /// The name of the member that leads here.
    name: Box<str>,
    /// The same as an array index, if it can be one.
    index: Option<usize>,
    slot: Option<Slot>,
    children: Vec<usize>,
}

/// At most this many names can be wanted side by side; they are remembered as bits.
const MAX_CHILDREN: usize = 64;

/// What a walk found.
#[derive(Debug)]
pub(crate) struct Extracted<'de> {
    values: SmallVec<[Option<&'de str>; 8]>,
    ambiguous: bool,
}

/// A value found in the document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scalar<'de> {
    /// A string's text, or the literal text of a number or boolean.
    Text(Cow<'de, str>),
    /// Absent, null, an object, an array, or the empty string.
    Missing,
    /// Present but not readable, such as half of a surrogate pair.
    Unreadable,
}

impl Plan {
    pub(crate) fn new() -> Self {
        Self { nodes: vec![Node::default()], slots: 0 }
    }

    /// Adds a pointer and says where its value will be. The same pointer gets the same slot.
    pub(crate) fn add(&mut self, pointer: &Pointer) -> Result<Slot, String> {
        let mut at = 0;
        for token in pointer.tokens() {
            let child = self.node(at).and_then(|node| self.child_named(node, token.as_bytes())).map(|(_, child)| child);
            at = match child {
                Some(child) => child,
                None => self.grow(at, token)?,
            };
        }
        let next = Slot(self.slots);
        let node = self.nodes.get_mut(at).ok_or("a pointer leads nowhere")?;
        let slot = *node.slot.get_or_insert(next);
        if slot == next {
            self.slots += 1;
        }
        Ok(slot)
    }

    /// Is nothing wanted, so that the body need not be looked at?
    pub(crate) const fn is_empty(&self) -> bool {
        self.slots == 0
    }

    /// Walks a document. A body that is not JSON holds nothing.
    pub(crate) fn walk<'de>(&self, body: &'de [u8]) -> Extracted<'de> {
        let mut out = Extracted { values: SmallVec::from_elem(None, self.slots), ambiguous: false };
        if self.is_empty() {
            return out;
        }
        let mut json = serde_json::Deserializer::from_slice(body);
        let walked = Walk { plan: self, at: 0, out: &mut out }.deserialize(&mut json).and_then(|()| json.end());
        if walked.is_err() {
            out.values.fill(None);
            // Not JSON: nothing there. JSON in form, yet the walk stumbled: a wanted value is broken.
            out.ambiguous = serde_json::from_slice::<IgnoredAny>(body).is_ok();
        }
        out
    }

    fn grow(&mut self, parent: usize, token: &str) -> Result<usize, String> {
        let child = self.nodes.len();
        let parent = self.nodes.get_mut(parent).ok_or("a pointer leads nowhere")?;
        if parent.children.len() == MAX_CHILDREN {
            return Err(format!("more than {MAX_CHILDREN} names are wanted side by side"));
        }
        parent.children.push(child);
        self.nodes.push(Node { name: token.into(), index: array_index(token), slot: None, children: Vec::new() });
        Ok(child)
    }

    fn node(&self, at: usize) -> Option<&Node> {
        self.nodes.get(at)
    }

    /// The child of that name: its place among its siblings and its number.
    fn child_named(&self, node: &Node, name: &[u8]) -> Option<(usize, usize)> {
        let child = |number: &usize| self.node(*number).is_some_and(|child| child.name.as_bytes() == name);
        let place = node.children.iter().position(child)?;
        node.children.get(place).map(|number| (place, *number))
    }

    fn child_at(&self, node: &Node, index: usize) -> Option<usize> {
        node.children.iter().copied().find(|number| self.node(*number).is_some_and(|child| child.index == Some(index)))
    }
}

impl<'de> Extracted<'de> {
    /// Was a name on a wanted path given twice, or a wanted value broken?
    pub(crate) const fn is_ambiguous(&self) -> bool {
        self.ambiguous
    }

    /// The JSON text of a value, whatever its type.
    pub(crate) fn raw(&self, slot: Slot) -> Option<&'de str> {
        self.values.get(slot.0).copied().flatten()
    }

    /// The value as text.
    pub(crate) fn scalar(&self, slot: Slot) -> Scalar<'de> {
        self.raw(slot).map_or(Scalar::Missing, scalar)
    }
}

/// Reads a value that is known to be JSON.
fn scalar(raw: &str) -> Scalar<'_> {
    match raw.as_bytes().first() {
        None | Some(b'{' | b'[' | b'n') => Scalar::Missing,
        Some(b'"') => {
            let inner = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or_default();
            let text = if inner.contains('\\') {
                match serde_json::from_str::<String>(raw) {
                    Ok(text) => Cow::Owned(text),
                    Err(_) => return Scalar::Unreadable,
                }
            } else {
                Cow::Borrowed(inner)
            };
            if text.is_empty() { Scalar::Missing } else { Scalar::Text(text) }
        }
        // Numbers keep their literal text: 9007199254740993 must not become 9007199254740992.
        Some(_) => Scalar::Text(Cow::Borrowed(raw)),
    }
}

/// The elements of the array at a pointer.
pub(crate) enum Elements<'de> {
    Found(Vec<&'de RawValue>),
    TooMany,
    /// Not JSON, not there, or not an array.
    NotAnArray,
    /// The path to the array is not unique.
    Ambiguous,
}

/// Finds an array and lists its elements, up to `limit`.
pub(crate) fn elements<'de>(plan: &Plan, slot: Slot, body: &'de [u8], limit: usize) -> Elements<'de> {
    let extracted = plan.walk(body);
    if extracted.is_ambiguous() {
        return Elements::Ambiguous;
    }
    let Some(raw) = extracted.raw(slot) else { return Elements::NotAnArray };
    let mut json = serde_json::Deserializer::from_str(raw);
    match (ListElements { limit }).deserialize(&mut json) {
        Ok(Some(found)) => Elements::Found(found),
        Ok(None) => Elements::NotAnArray,
        Err(_) if raw.starts_with('[') => Elements::TooMany,
        Err(_) => Elements::NotAnArray,
    }
}

/// Where the events of a batch stand: arrays, possibly inside of every element of another array.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    /// Patterns that begin with an array whose elements are looked into come before those that do not.
    levels: Vec<Level>,
}

#[derive(Debug, Clone)]
struct Level {
    plan: Plan,
    slot: Slot,
    /// Patterns inside of each element; none if the elements are the events.
    inside: Option<Batch>,
}

impl Batch {
    /// Reads patterns such as `/events` and `/entry/*/changes`. Patterns that agree up to their `*` share it.
    pub(crate) fn parse(patterns: &[&str]) -> Result<Self, String> {
        let mut outer: Vec<(&str, Vec<&str>)> = Vec::new();
        for pattern in patterns {
            let (outside, inside) = match pattern.split_once("/*") {
                Some((outside, inside)) => (outside, Some(inside)),
                None => (*pattern, None),
            };
            match outer.iter_mut().find(|(known, _)| *known == outside) {
                Some((_, list)) => list.extend(inside),
                None => outer.push((outside, inside.into_iter().collect())),
            }
        }
        let mut levels = Vec::new();
        for (outside, inside) in outer {
            let mut plan = Plan::new();
            let slot = plan.add(&Pointer::parse(outside)?)?;
            let inside = if inside.is_empty() { None } else { Some(Self::parse(&inside)?) };
            levels.push(Level { plan, slot, inside });
        }
        if levels.is_empty() {
            return Err("items must not be an empty list".to_owned());
        }
        Ok(Self { levels })
    }

    /// The events of a document, up to `limit`. An element in which none of the inner arrays is found is an event itself:
    /// nothing is left out.
    pub(crate) fn elements<'de>(&self, document: &'de [u8], limit: usize) -> Elements<'de> {
        let mut all = Vec::new();
        let mut any = false;
        for level in &self.levels {
            let found = match elements(&level.plan, level.slot, document, limit) {
                Elements::Found(found) => found,
                Elements::NotAnArray => continue,
                other => return other,
            };
            any = true;
            for element in found {
                match level.inside.as_ref().map(|inside| inside.elements(element.get().as_bytes(), limit)) {
                    None | Some(Elements::NotAnArray) => all.push(element),
                    Some(Elements::Found(inner)) => all.extend(inner),
                    Some(other) => return other,
                }
            }
            if all.len() > limit {
                return Elements::TooMany;
            }
        }
        if any { Elements::Found(all) } else { Elements::NotAnArray }
    }
}

/// `0`, or digits that do not begin with `0`.
fn array_index(token: &str) -> Option<usize> {
    let canonical = token == "0" || !token.starts_with('0');
    let digits = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_digit());
    if canonical && digits { token.parse().ok() } else { None }
}

/// Reads one value at one node of the trie.
struct Walk<'p, 'o, 'de> {
    plan: &'p Plan,
    at: usize,
    out: &'o mut Extracted<'de>,
}

impl<'de> DeserializeSeed<'de> for Walk<'_, '_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let Some(node) = self.plan.node(self.at) else { return Err(D::Error::custom("no such node")) };
        let Some(slot) = node.slot else { return deserializer.deserialize_any(self) };
        let raw = <&RawValue as serde::Deserialize>::deserialize(deserializer)?.get();
        if let Some(value) = self.out.values.get_mut(slot.0) {
            *value = Some(raw);
        }
        if node.children.is_empty() {
            return Ok(());
        }
        // Both this value and something inside it are wanted: read the inside from the value's own text.
        serde_json::Deserializer::from_str(raw).deserialize_any(self).map_err(D::Error::custom)
    }
}

impl<'de> Visitor<'de> for Walk<'_, '_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some(node) = self.plan.node(self.at) else { return Err(A::Error::custom("no such node")) };
        let mut seen = 0u64;
        while let Some(found) = map.next_key_seed(MatchName { plan: self.plan, node })? {
            let Some((place, child)) = found else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let bit = 1u64 << place;
            if seen & bit != 0 {
                self.out.ambiguous = true;
            }
            seen |= bit;
            map.next_value_seed(Walk { plan: self.plan, at: child, out: &mut *self.out })?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Some(node) = self.plan.node(self.at) else { return Err(A::Error::custom("no such node")) };
        for index in 0.. {
            let more = match self.plan.child_at(node, index) {
                Some(child) => {
                    seq.next_element_seed(Walk { plan: self.plan, at: child, out: &mut *self.out })?.is_some()
                }
                None => seq.next_element::<IgnoredAny>()?.is_some(),
            };
            if !more {
                break;
            }
        }
        Ok(())
    }

    // A path that ends early, at a value with nothing inside, finds nothing.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
}

/// Compares a member's name with the wanted ones, as bytes, without copying it.
struct MatchName<'p> {
    plan: &'p Plan,
    node: &'p Node,
}

impl<'de> DeserializeSeed<'de> for MatchName<'_> {
    type Value = Option<(usize, usize)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        // Bytes rather than text: a strange name elsewhere in the document is not our concern.
        deserializer.deserialize_bytes(self)
    }
}

impl Visitor<'_> for MatchName<'_> {
    type Value = Option<(usize, usize)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member's name")
    }

    fn visit_bytes<E>(self, name: &[u8]) -> Result<Self::Value, E> {
        Ok(self.plan.child_named(self.node, name))
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(self.plan.child_named(self.node, name.as_bytes()))
    }
}

/// Lists the elements of an array; nothing if the value is not one; an error if there are too many.
struct ListElements {
    limit: usize,
}

impl<'de> DeserializeSeed<'de> for ListElements {
    type Value = Option<Vec<&'de RawValue>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ListElements {
    type Value = Option<Vec<&'de RawValue>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut found = Vec::new();
        while let Some(element) = seq.next_element::<&RawValue>()? {
            if found.len() == self.limit {
                return Err(A::Error::custom("too many elements"));
            }
            found.push(element);
        }
        Ok(Some(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(pointer: &str, body: &[u8]) -> Scalar<'static> {
        let mut plan = Plan::new();
        let slot = plan.add(&Pointer::parse(pointer).unwrap()).unwrap();
        let found = plan.walk(body);
        if found.is_ambiguous() {
            return Scalar::Unreadable;
        }
        match found.scalar(slot) {
            Scalar::Text(text) => Scalar::Text(Cow::Owned(text.into_owned())),
            Scalar::Missing => Scalar::Missing,
            Scalar::Unreadable => Scalar::Unreadable,
        }
    }

    fn text(text: &str) -> Scalar<'static> {
        Scalar::Text(Cow::Owned(text.to_owned()))
    }

    #[test]
    fn values_are_found_by_path() {
        let body = br#"{"a":{"b":[10,{"c":"x"}],"":1,"s/t":2,"~":3},"z":true}"#;
        assert_eq!(get("/a/b/0", body), text("10"));
        assert_eq!(get("/a/b/1/c", body), text("x"));
        assert_eq!(get("/a/", body), text("1"));
        assert_eq!(get("/a/s~1t", body), text("2"));
        assert_eq!(get("/a/~0", body), text("3"));
        assert_eq!(get("/z", body), text("true"));
        for missing in ["/a", "/a/b", "/a/b/2", "/a/b/00", "/a/b/-", "/q", "/z/q", "/a/b/0/x"] {
            assert_eq!(get(missing, body), Scalar::Missing, "{missing}");
        }
    }

    #[test]
    fn batches_inside_of_batches_lose_nothing() {
        let batch = Batch::parse(&["/entry/*/changes", "/entry/*/messaging"]).unwrap();
        let texts = |body: &str| match batch.elements(body.as_bytes(), 5) {
            Elements::Found(found) => found.iter().map(|raw| raw.get().to_owned()).collect(),
            Elements::TooMany => vec!["too many".to_owned()],
            Elements::NotAnArray => vec!["not a list".to_owned()],
            Elements::Ambiguous => vec!["ambiguous".to_owned()],
        };
        assert_eq!(texts(r#"{"entry":[{"changes":[1,2]},{"messaging":[3]}]}"#), ["1", "2", "3"]);
        assert_eq!(
            texts(r#"{"entry":[{"changes":[1],"messaging":[2]},{"standby":[3]}]}"#),
            ["1", "2", r#"{"standby":[3]}"#]
        );
        assert_eq!(texts(r#"{"entry":[]}"#), Vec::<String>::new());
        assert_eq!(texts(r#"{"entry":{}}"#), ["not a list"]);
        assert_eq!(texts(r#"{"entry":[{"changes":[1,2,3]},{"changes":[4,5,6]}]}"#), ["too many"]);
        assert_eq!(texts(r#"{"entry":[{"changes":[1],"changes":[2]}]}"#), ["ambiguous"]);
        let either = Batch::parse(&["/eventNotifications", ""]).unwrap();
        assert!(matches!(either.elements(b"[1,2]", 5), Elements::Found(found) if found.len() == 2));
        assert!(
            matches!(either.elements(br#"{"eventNotifications":[1]}"#, 5), Elements::Found(found) if found.len() == 1)
        );
    }

    #[test]
    fn names_and_values_may_be_escaped() {
        assert_eq!(get("/id", br#"{"\u0069d":"a\u0062"}"#), text("ab"));
        assert_eq!(get("/id", br#"{"id":"\u0000"}"#), text("\0"));
        assert_eq!(get("/id", br#"{"id":"\ud83d\ude00"}"#), text("\u{1f600}"));
    }

    #[test]
    fn numbers_keep_every_digit() {
        assert_eq!(get("/id", br#"{"id":9007199254740993}"#), text("9007199254740993"));
        assert_eq!(get("/id", br#"{"id":1.10e2}"#), text("1.10e2"));
        let long = "7".repeat(100_000);
        assert_eq!(get("/id", format!("{{\"id\":{long}}}").as_bytes()), text(&long));
    }

    #[test]
    fn nothing_counts_as_missing() {
        for body in
            [r#"{"id":null}"#, r#"{"id":{}}"#, r#"{"id":[]}"#, r#"{"id":""}"#, "{}", "[]", "3", "null", "\"id\""]
        {
            assert_eq!(get("/id", body.as_bytes()), Scalar::Missing, "{body}");
        }
    }

    #[test]
    fn what_is_not_json_holds_nothing() {
        for body in [
            &b""[..],
            b"id=1",
            b"{\"id\":1",
            b"{\"id\":1} x",
            b"{\"id\":1}{}",
            b"\xef\xbb\xbf{\"id\":1}",
            b"{'id':1}",
            b"\xff",
        ] {
            assert_eq!(get("/id", body), Scalar::Missing, "{body:?}");
        }
    }

    #[test]
    fn a_name_given_twice_on_the_path_is_ambiguous() {
        for body in
            [r#"{"id":1,"id":2}"#, r#"{"id":1,"\u0069d":1}"#, r#"{"a":{"id":1},"a":{}}"#, r#"{"a":{"id":1,"id":1}}"#]
        {
            let pointer = if body.contains("\"a\"") { "/a/id" } else { "/id" };
            assert_eq!(get(pointer, body.as_bytes()), Scalar::Unreadable, "{body}");
        }
        assert_eq!(get("/id", br#"{"x":1,"x":2,"id":3}"#), text("3"), "off the path it does not matter");
    }

    #[test]
    fn a_broken_wanted_value_is_not_taken_for_missing() {
        assert_eq!(get("/id", br#"{"id":"\ud800"}"#), Scalar::Unreadable);
        assert_eq!(get("/id", b"{\"id\":\"\xff\"}"), Scalar::Unreadable);
        assert_eq!(
            get("/id", b"{\"x\":\"\xff\",\"\\ud800\":1,\"id\":3}"),
            text("3"),
            "off the path it does not matter"
        );
    }

    #[test]
    fn depth_elsewhere_costs_nothing() {
        let depth = 100_000;
        let body = format!("{{\"deep\":{}{},\"id\":\"x\"}}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(get("/id", body.as_bytes()), text("x"));
        assert_eq!(get("/deep", body.as_bytes()), Scalar::Missing);
    }

    #[test]
    fn a_value_and_its_inside_can_both_be_wanted() {
        let mut plan = Plan::new();
        let outer = plan.add(&Pointer::parse("/a").unwrap()).unwrap();
        let inner = plan.add(&Pointer::parse("/a/b").unwrap()).unwrap();
        assert_eq!(plan.add(&Pointer::parse("/a").unwrap()).unwrap(), outer, "the same pointer, the same slot");
        let found = plan.walk(br#"{"a": {"b":1} }"#);
        assert_eq!(found.raw(outer), Some(r#"{"b":1}"#));
        assert_eq!(found.scalar(inner), text("1"));
    }
}
