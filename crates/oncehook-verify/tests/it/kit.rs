//! Tools of the tests: requests that can be built and bent, and a genuine request of every preset.

use http::{HeaderMap, HeaderName, HeaderValue};
use oncehook_verify::{
    FetchedKey, Identified, Identifier, Identify, Item, MissingKey, Preset, Rejection, Request, Scheme, Secret,
    Settings, Signer, Unidentified, UnixMicros, Verifier,
};

use crate::keys;

/// The time at which tests happen, one second after the vectors were signed.
pub(crate) const NOW: UnixMicros = UnixMicros(1_700_000_001_000_000);

/// The body of the vectors made with the official libraries.
pub(crate) const EVENT: &[u8] = br#"{"id":"evt_1","type":"demo.created","data":{"object":{"id":"obj_1"}}}"#;

pub(crate) const SEED_1: &str = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
pub(crate) const PUBLIC_1: &str = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
pub(crate) const SEED_2: &str = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb";
pub(crate) const PUBLIC_2: &str = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c";

/// A request that owns its parts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sent {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    /// Path and query.
    pub(crate) path: String,
}

/// The public address of all sources in these tests.
pub(crate) const URL: &str = "https://gateway.example/webhooks/test";

impl Sent {
    pub(crate) fn new(body: &[u8]) -> Self {
        Self { headers: HeaderMap::new(), body: body.to_vec(), path: "/webhooks/test".to_owned() }
    }

    /// The same with a query.
    pub(crate) fn asking(mut self, query: &str) -> Self {
        self.path = format!("/webhooks/test?{query}");
        self
    }

    /// The same with one more header.
    pub(crate) fn with(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.add(name, value);
        self
    }

    pub(crate) fn add(&mut self, name: &str, value: impl AsRef<[u8]>) {
        let name: HeaderName = name.parse().unwrap();
        self.headers.append(name, HeaderValue::from_bytes(value.as_ref()).unwrap());
    }

    /// The same with one header replaced.
    pub(crate) fn replacing(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.remove(name);
        self.with(name, value)
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.remove(name);
        self
    }

    pub(crate) fn header(&self, name: &str) -> String {
        self.headers.get(name).unwrap().to_str().unwrap().to_owned()
    }

    pub(crate) fn request(&self) -> Request<'_> {
        Request { method: "POST", path: &self.path, headers: &self.headers, body: &self.body }
    }

    /// Signs with a scheme and adds what that takes.
    pub(crate) fn signed(self, scheme: &Scheme, secret: &str, id: &str, at: UnixMicros) -> Self {
        self.signed_with(&Signer::new(scheme, &self::secret(secret)).unwrap(), id, at)
    }

    pub(crate) fn signed_with(mut self, signer: &Signer, id: &str, at: UnixMicros) -> Self {
        let signed = signer.sign_whole(&self.request(), id, at).unwrap();
        self.path = signed.path(&self.path).into_owned();
        for (name, value) in signed.headers {
            self.headers.insert(name, value);
        }
        if let Some(body) = signed.body {
            self.body = body;
        }
        self
    }
}

pub(crate) fn secret(text: &str) -> Secret {
    Secret::new(text).unwrap()
}

pub(crate) fn secrets(texts: &[&str]) -> Vec<Secret> {
    texts.iter().map(|text| secret(text)).collect()
}

pub(crate) fn preset(name: &str) -> &'static Preset {
    Preset::named(name).unwrap()
}

pub(crate) fn scheme(name: &str) -> &'static Scheme {
    &preset(name).verify
}

pub(crate) fn scheme_from(toml: &str) -> Scheme {
    toml::from_str(toml).unwrap()
}

/// Verifies and tells the index of the secret that matched.
pub(crate) fn check(scheme: &Scheme, secret_texts: &[&str], sent: &Sent, now: UnixMicros) -> Result<usize, Rejection> {
    let verifier = Verifier::new(scheme, &secrets(secret_texts), None).unwrap();
    verifier.verify(&sent.request(), now).map(|verified| verified.secret_index())
}

/// The code of the rejection, or `ok`.
pub(crate) fn code(scheme: &Scheme, secret_texts: &[&str], sent: &Sent, now: UnixMicros) -> &'static str {
    match check(scheme, secret_texts, sent, now) {
        Ok(_) => "ok",
        Err(rejection) => rejection.code(),
    }
}

/// A preset with everything it needs to sign and to verify.
pub(crate) struct Side {
    pub(crate) preset: &'static Preset,
    pub(crate) settings: Settings,
    /// What signs and what verifies, two of each.
    pub(crate) pairs: [(String, String); 2],
}

impl Side {
    pub(crate) fn of(name: &str) -> Self {
        let preset = preset(name);
        let params = preset.params.iter().map(|param| (param.name.clone(), param.example.clone())).collect();
        let settings = Settings { tolerance_secs: None, url: Some(URL.to_owned()), params };
        Self { preset, settings, pairs: keys::pairs(preset) }
    }

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Preset::all().iter().map(|preset| Self::of(&preset.name))
    }

    /// A verifier with the public halves of these pairs. A scheme that fetches its keys has none.
    pub(crate) fn verifier(&self, which: &[usize]) -> Verifier {
        let texts: Vec<&str> = which.iter().map(|index| self.pairs[*index].1.as_str()).collect();
        let secrets = if self.preset.verify.fetches_keys() { Vec::new() } else { secrets(&texts) };
        Verifier::with(&self.preset.verify, &secrets, self.settings.clone()).unwrap()
    }

    /// The genuine request of the sample, signed with one of the pairs at a time.
    pub(crate) fn genuine(&self, which: usize, at: UnixMicros) -> Sent {
        self.genuine_named(which, "evt_1", at)
    }

    pub(crate) fn genuine_named(&self, which: usize, id: &str, at: UnixMicros) -> Sent {
        if self.preset.name == "paddle-classic" {
            return keys::paddle_classic(which);
        }
        self.sign(self.unsigned(id, at), which, id, at)
    }

    /// The same for a preset whose keys are fetched, under the name of the key with that number.
    pub(crate) fn genuine_under(&self, key: usize, which: usize, at: UnixMicros) -> Sent {
        let name = keys::name(&self.preset.name, key);
        let mut sent = self.unsigned("evt_1", at);
        match self.preset.name.as_str() {
            "paypal" => sent = sent.replacing("paypal-cert-url", &name),
            "aws-sns" => {
                let mut message: serde_json::Value = serde_json::from_slice(&sent.body).unwrap();
                message["SigningCertURL"] = name.into();
                sent.body = message.to_string().into_bytes();
            }
            _ => {
                let mut settings = self.settings.clone();
                settings.params.insert("kid".to_owned(), name);
                let side = Self { preset: self.preset, settings, pairs: self.pairs.clone() };
                return side.sign(sent, which, "evt_1", at);
            }
        }
        self.sign(sent, which, "evt_1", at)
    }

    /// The sample before it is signed.
    fn unsigned(&self, id: &str, at: UnixMicros) -> Sent {
        let (headers, body) = self.preset.sample.render(id, None, at).unwrap();
        let sent = Sent { headers, body, ..Sent::new(b"") };
        match &self.preset.sample.query {
            Some(query) => sent.asking(query),
            None => sent,
        }
    }

    pub(crate) fn sign(&self, sent: Sent, which: usize, id: &str, at: UnixMicros) -> Sent {
        let signer = Signer::with(&self.preset.verify, &secret(&self.pairs[which].0), self.settings.clone()).unwrap();
        sent.signed_with(&signer, id, at)
    }

    /// The verdict about a request. A key that is fetched is that of the last pair, under the name that the sample says.
    pub(crate) fn check(&self, which: &[usize], sent: &Sent, now: UnixMicros) -> Result<usize, Rejection> {
        let verifier = self.verifier(which);
        let request = sent.request();
        let fetched = self.fetch(&verifier, which, &request)?;
        verifier.verify_with(&request, now, fetched.as_ref()).map(|verified| verified.secret_index())
    }

    /// The verdict while the provider publishes each of these pairs under the name with its number.
    pub(crate) fn check_published(&self, pairs: &[usize], sent: &Sent, now: UnixMicros) -> Result<usize, Rejection> {
        let published: Vec<(String, usize)> =
            pairs.iter().map(|pair| (keys::name(&self.preset.name, *pair), *pair)).collect();
        let (verifier, request) = (self.verifier(&[]), sent.request());
        let fetched = self.ask(&verifier, &published, &request)?;
        verifier.verify_with(&request, now, fetched.as_ref()).map(|verified| verified.secret_index())
    }

    pub(crate) fn fetch(
        &self,
        verifier: &Verifier,
        which: &[usize],
        request: &Request<'_>,
    ) -> Result<Option<FetchedKey>, Rejection> {
        let sample = &self.preset.sample;
        let said = match self.preset.name.as_str() {
            "paypal" => sample.headers["paypal-cert-url"].clone(),
            "aws-sns" => {
                let message: serde_json::Value = serde_json::from_str(&sample.body).unwrap();
                message["SigningCertURL"].as_str().unwrap().to_owned()
            }
            _ => self.settings.params.get("kid").cloned().unwrap_or_default(),
        };
        let published: Vec<(String, usize)> = which.last().map(|pair| (said, *pair)).into_iter().collect();
        self.ask(verifier, &published, request)
    }

    fn ask(
        &self,
        verifier: &Verifier,
        published: &[(String, usize)],
        request: &Request<'_>,
    ) -> Result<Option<FetchedKey>, Rejection> {
        let Some(wanted) = verifier.key_request(request)? else { return Ok(None) };
        let answer = keys::answer(published, &wanted);
        Ok(answer.and_then(|answer| verifier.read_key(&wanted, &answer).ok()))
    }

    /// The events of a genuine request.
    pub(crate) fn identify(&self, sent: &Sent, now: UnixMicros) -> Identified {
        let verifier = self.verifier(&[0]);
        let request = sent.request();
        let fetched = self.fetch(&verifier, &[0], &request).unwrap();
        let verified = verifier.verify_with(&request, now, fetched.as_ref()).unwrap();
        let identifier = Identifier::new(&self.preset.identify, &self.preset.verify, MissingKey::Digest).unwrap();
        identifier.identify(&verified).unwrap()
    }
}

/// Two secrets of a preset with shared or Ed25519 secrets: what signs and what verifies.
pub(crate) fn key_pairs(preset: &str) -> [(&'static str, &'static str); 2] {
    match preset {
        "discord" => [(SEED_1, PUBLIC_1), (SEED_2, PUBLIC_2)],
        "standard-webhooks" | "svix" => [
            ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
            ("whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD", "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"),
        ],
        _ => [("whsec_first_secret", "whsec_first_secret"), ("another-secret-1", "another-secret-1")],
    }
}

/// A genuine request of a preset that needs nothing but a secret: its sample, signed.
pub(crate) fn genuine(preset: &Preset, signing_secret: &str, at: UnixMicros) -> Sent {
    let (headers, body) = preset.sample.render("evt_1", None, at).unwrap();
    Sent { headers, body, ..Sent::new(b"") }.signed(&preset.verify, signing_secret, "evt_1", at)
}

/// Identifies a body with an identification given as TOML. The request is genuine under a token.
pub(crate) fn identify_with(toml: &str, missing_key: MissingKey, sent: Sent) -> Result<Identified, Unidentified> {
    let scheme = scheme_from("algorithm = \"token\"\nsignature = { header = \"x-test-token\" }");
    let identify: Identify = toml::from_str(toml).unwrap();
    let identifier = Identifier::new(&identify, &scheme, missing_key).unwrap();
    let sent = sent.with("x-test-token", "letmein");
    let verifier = Verifier::new(&scheme, &secrets(&["letmein"]), None).unwrap();
    let request = sent.request();
    identifier.identify(&verifier.verify(&request, NOW).unwrap())
}

/// The single event of a body.
pub(crate) fn item(toml: &str, sent: Sent) -> Item {
    match identify_with(toml, MissingKey::Digest, sent).unwrap() {
        Identified::One(item) => item,
        Identified::Batch(_) => panic!("a batch where one event was expected"),
    }
}

/// The single event of a JSON body.
pub(crate) fn item_of(toml: &str, body: &str) -> Item {
    item(toml, Sent::new(body.as_bytes()))
}
