//! Requests that hold several events, and the digest of an event.

use oncehook_verify::{Identified, Item, MAX_BATCH_ITEMS, MissingKey, Quarantine, Unidentified, UnixMicros, digest};

use crate::kit::{Sent, identify_with, item, item_of};

fn batch(toml: &str, body: &str) -> Result<Vec<Item>, Unidentified> {
    match identify_with(toml, MissingKey::Digest, Sent::new(body.as_bytes()).with("x-shop", "s1"))? {
        Identified::Batch(items) => Ok(items),
        Identified::One(item) => Ok(vec![item]),
    }
}

#[test]
fn each_item_has_its_own_identity_and_bytes() {
    let toml = "items = \"/events\"\nkey = [\"header:x-shop\", \"/id\"]\ntype = \"/t\"\ntime = { from = \"/at\", unit = \"ms\" }";
    let body = r#"{"n":2, "events" : [ {"id":1,"t":"a","at":5} , {"id":2,"t":"b"} ] }"#;
    let items = batch(toml, body).unwrap();
    assert_eq!(items.len(), 2);
    assert_eq!(items[0].key.as_bytes(), b"2:s1,1:1");
    assert_eq!(items[1].kind.as_deref(), Some("b"));
    assert_eq!(items[0].occurred_at, Some(UnixMicros(5_000)));
    assert_eq!(&body[items[0].body.clone()], r#"{"id":1,"t":"a","at":5}"#);
    assert_eq!(&body[items[1].body.clone()], r#"{"id":2,"t":"b"}"#);
    assert_eq!(items[1].digest, digest(br#"{"id":2,"t":"b"}"#));
}

#[test]
fn the_whole_body_can_be_the_list() {
    let items = batch("items = \"\"\nkey = \"/id\"", r#"[{"id":"a"},{"id":"b"},7]"#).unwrap();
    assert_eq!(items[1].key.as_bytes(), b"b");
    assert_eq!(items[2].key, oncehook_verify::EventKey::of_digest(&digest(b"7")), "an item without an id");
}

#[test]
fn an_empty_list_is_a_batch_and_no_list_is_not() {
    let toml = "items = \"/events\"\nkey = \"/id\"";
    assert_eq!(batch(toml, r#"{"events":[]}"#), Ok(vec![]));
    for body in ["{}", r#"{"events":null}"#, r#"{"events":{}}"#, r#"{"events":"x"}"#, "[]", "x", ""] {
        assert_eq!(batch(toml, body), Err(Unidentified::NotABatch), "{body}");
    }
}

#[test]
fn the_number_of_items_is_limited() {
    let list = |count: usize| format!("{{\"events\":[{}]}}", vec!["{}"; count].join(","));
    let toml = "items = \"/events\"\nkey = \"digest\"";
    assert_eq!(batch(toml, &list(MAX_BATCH_ITEMS)).unwrap().len(), MAX_BATCH_ITEMS);
    assert_eq!(batch(toml, &list(MAX_BATCH_ITEMS + 1)), Err(Unidentified::TooManyItems));
}

#[test]
fn an_ambiguous_list_is_kept_whole() {
    let items = batch("items = \"/events\"\nkey = \"/id\"", r#"{"events":[],"events":[{"id":1}]}"#).unwrap();
    assert_eq!(items.len(), 1);
    assert_eq!(items[0].quarantine, Some(Quarantine::AmbiguousJson));
}

#[test]
fn one_ambiguous_item_does_not_taint_the_others() {
    let items = batch("items = \"\"\nkey = \"/id\"", r#"[{"id":1,"id":2},{"id":3}]"#).unwrap();
    assert_eq!(items[0].quarantine, Some(Quarantine::AmbiguousJson));
    assert_eq!(items[1].quarantine, None);
}

#[test]
fn volatile_values_do_not_change_the_digest_and_others_do() {
    let toml = "key = \"/id\"\nvolatile = [\"/attempt\", \"/meta/sent\", \"/meta\"]";
    let of = |body: &str| item_of(toml, body).digest;
    let first = of(r#"{"id":1,"attempt":1,"meta":{"sent":"x"},"a":1}"#);
    assert_eq!(first, of(r#"{"id":1,"attempt":22,"meta":null,"a":1}"#));
    assert_ne!(first, of(r#"{"id":1,"attempt":1,"meta":{"sent":"x"},"a":2}"#));
    assert_eq!(of("{\"id\":1}"), digest(b"{\"id\":1}"), "nothing volatile, nothing cut");
    assert_eq!(of("no json"), digest(b"no json"));
}

#[test]
fn names_are_joined_and_optional_parts_may_be_absent() {
    let toml = "key = \"digest\"\ntype = [\"header:x-event\", \"/action?\"]\nentity = [\"/a\", \"/b\"]";
    let of = |body: &str| item(toml, Sent::new(body.as_bytes()).with("x-event", "issues"));
    assert_eq!(of(r#"{"action":"opened"}"#).kind.as_deref(), Some("issues.opened"));
    assert_eq!(of("{}").kind.as_deref(), Some("issues"));
    assert_eq!(item_of(toml, r#"{"action":"opened"}"#).kind, None, "a required part is absent");
    assert_eq!(of(r#"{"a":1,"b":true}"#).entity.as_deref(), Some("1:true"));
    assert_eq!(of(r#"{"a":1}"#).entity, None);
}

#[test]
fn times_are_read_in_their_unit_or_not_at_all() {
    let of = |unit: &str, value: &str| {
        item_of(&format!("time = {{ from = \"/t\", unit = \"{unit}\" }}"), &format!("{{\"t\":{value}}}")).occurred_at
    };
    assert_eq!(of("s", "1700000000"), Some(UnixMicros::from_secs(1_700_000_000)));
    assert_eq!(of("s", "\"1700000000\""), Some(UnixMicros::from_secs(1_700_000_000)));
    assert_eq!(of("ms", "1700000000123"), Some(UnixMicros(1_700_000_000_123_000)));
    assert_eq!(of("rfc3339", "\"2023-11-14T22:13:20Z\""), Some(UnixMicros::from_secs(1_700_000_000)));
    assert_eq!(of("rfc3339", "\"2023-11-14 22:13:20 UTC\""), Some(UnixMicros::from_secs(1_700_000_000)));
    for (unit, value) in
        [("s", "1e9"), ("s", "9223372036854775807"), ("ms", "null"), ("rfc3339", "1700000000"), ("rfc3339", "\"soon\"")]
    {
        assert_eq!(of(unit, value), None, "{unit} {value}");
    }
}
