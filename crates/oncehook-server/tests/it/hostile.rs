//! What strangers send: through the real front door, with nothing but a socket.

mod bodies;
mod floods;
mod framing;
mod ids;
mod leaks;
mod slow;

use crate::kit::{Rig, Signs};

const STRIPE: &str = "whsec_hostile_stripe_9f2";
const GITHUB: &str = "github hostile secret 77";

const SECRETS: [(&str, &str); 2] = [("stripe.secret", STRIPE), ("github.secret", GITHUB)];

const SOURCES: &str = r#"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]

[[source]]
name = "held"
provider = "stripe"
secrets = ["file:stripe.secret"]
missing_key = "quarantine"

[[source]]
name = "strict"
provider = "stripe"
secrets = ["file:stripe.secret"]
missing_key = "reject"

[[source]]
name = "github"
provider = "github"
secrets = ["file:github.secret"]

[[source]]
name = "pair"
provider = "custom"
secrets = ["file:github.secret"]
[source.verify]
algorithm = "hmac-sha256"
key = "utf8"
content = "{body}"
signature = { header = "x-hub-signature-256", grammar = { prefix = "sha256=" }, encoding = "hex" }
[source.identify]
key = ["/a", "/b"]
"#;

fn rig(server: &str) -> Rig {
    Rig::start(server, SOURCES, &SECRETS)
}

fn stripe() -> Signs {
    Signs::preset("stripe", STRIPE, "stripe")
}

fn github() -> Signs {
    Signs::preset("github", GITHUB, "github")
}

/// A genuine Stripe event whose id is this JSON value.
fn event(id_json: &str) -> Vec<u8> {
    stripe().post(&[], format!(r#"{{"id":{id_json},"type":"a.b"}}"#).as_bytes())
}

const SHORT: &str = "[server.limits]\nhead = \"1s\"\nbody = \"1s\"\n";
