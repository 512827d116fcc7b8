// Official libraries for Node against oncehook, both ways. One line per provider and direction; exits 1 at the first
// disagreement. "checks": what oncehook signed, the library accepts (and refuses once it is bent). "signs": what the library
// signed, oncehook accepts (and refuses once it is bent).

import { execFileSync } from "node:child_process";
import { createRequire } from "node:module";
import { createSecretKey, generateKeyPairSync } from "node:crypto";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const require = createRequire(import.meta.url);
const binary = process.env.ONCEHOOK;
const directory = mkdtempSync(join(tmpdir(), "conformance-"));
const address = (provider) => `https://gateway.example/webhooks/${provider}`;
const EVENT = '{"id":"evt_1","type":"demo.created","data":{"object":{"id":"obj_1"}}}';
let failures = 0;

function oncehook(args, secret) {
  const env = { ...process.env, CONFORMANCE_SECRET: secret };
  try {
    return { ok: true, out: execFileSync(binary, args, { env, stdio: ["ignore", "pipe", "pipe"] }) };
  } catch (error) {
    return { ok: false, out: error.stdout, err: String(error.stderr) };
  }
}

/** A request that oncehook has signed: its headers in lower case, its body, its address. */
function signedBy(provider, secret, extra = []) {
  const args = ["send", "--provider", provider, "--secret", "env:CONFORMANCE_SECRET", "--print", "--url", address(provider), "--key", "evt_1", ...extra];
  const { ok, out, err } = oncehook(args, secret);
  if (!ok) throw new Error(`oncehook does not sign for ${provider}: ${err}`);
  const end = out.indexOf("\r\n\r\n");
  const lines = out.subarray(0, end).toString().split("\r\n");
  const headers = Object.fromEntries(lines.slice(1).map((line) => [line.slice(0, line.indexOf(":")).toLowerCase(), line.slice(line.indexOf(":") + 2)]));
  const path = lines[0].split(" ")[1];
  return { headers, body: out.subarray(end + 4), text: out.subarray(end + 4).toString(), path, url: `https://gateway.example${path}` };
}

/** Does oncehook take this request for genuine? */
function acceptedByOncehook(provider, secret, { headers, body, query = "" }, extra = []) {
  const file = join(directory, "request");
  const head = [`POST /webhooks/${provider}${query ? `?${query}` : ""} HTTP/1.1`, ...Object.entries(headers).map(([name, value]) => `${name}: ${value}`)];
  writeFileSync(file, Buffer.concat([Buffer.from(head.join("\r\n") + "\r\n\r\n"), Buffer.from(body)]));
  const args = ["verify", "--provider", provider, "--secret", "env:CONFORMANCE_SECRET", "--request", file, "--public-url", address(provider), "--json", ...extra];
  const { out, err } = oncehook(args, secret);
  if (!out || !out.length) throw new Error(`oncehook does not verify for ${provider}: ${err}`);
  return JSON.parse(out).genuine;
}

const holds = async (check) => {
  try {
    return (await check()) !== false;
  } catch {
    return false;
  }
};

const report = (provider, library, direction, ok, why = "") => {
  if (!ok) failures += 1;
  console.log(`${ok ? "ok" : "FAILED"} ${provider} ${library} ${direction}${why ? ` ${why}` : ""}`);
};

/** What oncehook signed, the library must accept, and must refuse when it is bent. */
async function checks(provider, library, secret, check, { extra = [], bend } = {}) {
  try {
    const sent = signedBy(provider, secret, extra);
    const genuine = await holds(() => check(sent));
    const bent = bend ? bend(sent) : { ...sent, body: Buffer.concat([sent.body, Buffer.from(" ")]), text: `${sent.text} ` };
    const forged = await holds(() => check(bent));
    report(provider, library, "checks", genuine && !forged, genuine ? (forged ? "(accepts a forgery)" : "") : "(refuses)");
  } catch (error) {
    report(provider, library, "checks", false, String(error).slice(0, 300));
  }
}

/** What the library signed, oncehook must accept, and must refuse when it is bent. */
async function signs(provider, library, secret, make, { extra = [], bend } = {}) {
  try {
    const sent = await make();
    const genuine = acceptedByOncehook(provider, secret, sent, extra);
    const bent = bend ? bend(sent) : { ...sent, body: `${sent.body} ` };
    const forged = acceptedByOncehook(provider, secret, bent, extra);
    report(provider, library, "signs", genuine && !forged, genuine ? (forged ? "(a forgery is accepted)" : "") : "(refused)");
  } catch (error) {
    report(provider, library, "signs", false, String(error).slice(0, 300));
  }
}

const seconds = () => Math.floor(Date.now() / 1000);
const WHSEC = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

// Stripe
const Stripe = require("stripe");
const stripe = new (Stripe.default ?? Stripe)("sk_test_x");
await checks("stripe", "stripe", "whsec_test", ({ text, headers }) => stripe.webhooks.constructEvent(text, headers["stripe-signature"], "whsec_test") && true);
await signs("stripe", "stripe", "whsec_test", () => ({ headers: { "stripe-signature": stripe.webhooks.generateTestHeaderString({ payload: EVENT, secret: "whsec_test" }) }, body: EVENT }));

// Svix and Standard Webhooks
for (const [provider, library, prefix] of [["svix", "svix", "svix"], ["standard-webhooks", "standardwebhooks", "webhook"]]) {
  const { Webhook } = require(library);
  const webhook = new Webhook(WHSEC);
  await checks(provider, library, WHSEC, ({ text, headers }) => Boolean(webhook.verify(text, headers)));
  await signs(provider, library, WHSEC, () => {
    const now = new Date();
    return { headers: { [`${prefix}-id`]: "msg_1", [`${prefix}-timestamp`]: String(Math.floor(now / 1000)), [`${prefix}-signature`]: webhook.sign("msg_1", now, EVENT) }, body: EVENT };
  });
}
const { Webhook: StandardWebhook } = require("standardwebhooks");
for (const provider of ["liveblocks", "dodo-payments", "gitlab-signed"]) {
  await checks(provider, "standardwebhooks", WHSEC, ({ text, headers }) => Boolean(new StandardWebhook(WHSEC).verify(text, headers)));
}

// GitHub
const octokit = await import("@octokit/webhooks-methods");
await checks("github", "@octokit/webhooks-methods", "mysecret", ({ text, headers }) => octokit.verify("mysecret", text, headers["x-hub-signature-256"]));
await signs("github", "@octokit/webhooks-methods", "mysecret", async () => ({ headers: { "x-hub-signature-256": await octokit.sign("mysecret", EVENT) }, body: EVENT }));

// Twilio, forms and JSON
const twilio = require("twilio");
const fields = (text) => Object.fromEntries(new URLSearchParams(text));
await checks("twilio", "twilio", "12345", ({ text, headers, url }) => twilio.validateRequest("12345", headers["x-twilio-signature"], url, fields(text)), {
  bend: (sent) => ({ ...sent, text: sent.text.replace("delivered", "failed") }),
});
await checks("twilio", "twilio(json)", "12345", ({ text, headers, url }) => twilio.validateRequestWithBody("12345", headers["x-twilio-signature"], url, text), {
  extra: ["--header", "content-type: application/json"],
});
await signs("twilio", "twilio", "12345", () => {
  const params = { CallSid: "CA1", Digits: "1234", From: "+14158675309" };
  return { headers: { "content-type": "application/x-www-form-urlencoded", "x-twilio-signature": twilio.getExpectedTwilioSignature("12345", `${address("twilio")}?foo=1`, params) }, body: new URLSearchParams(params).toString(), query: "foo=1" };
}, { bend: (sent) => ({ ...sent, body: sent.body.replace("1234", "1235") }) });

// Square, Razorpay
const { WebhooksHelper } = require("square");
await checks("square", "square", "sq_key", ({ text, headers }) => WebhooksHelper.verifySignature({ requestBody: text, signatureHeader: headers["x-square-hmacsha256-signature"], signatureKey: "sq_key", notificationUrl: address("square") }));
const Razorpay = require("razorpay");
await checks("razorpay", "razorpay", "123456", ({ text, headers }) => Razorpay.validateWebhookSignature(text, headers["x-razorpay-signature"], "123456"));

// Adyen
const adyen = new (require("@adyen/api-library").hmacValidator)();
const ADYEN = "DFB1EB5485895CFA84146406857104ABB4CBCABDC8AAF103A624C8F6A3EAAB00";
await checks("adyen", "@adyen/api-library", ADYEN, ({ text }) => adyen.validateHMAC(JSON.parse(text).notificationItems[0].NotificationRequestItem, ADYEN), {
  bend: (sent) => ({ ...sent, text: sent.text.replace("4200", "4201") }),
});
await signs("adyen", "@adyen/api-library", ADYEN, () => {
  const item = { pspReference: "psp1", merchantAccountCode: "m", merchantReference: "order:1\\", amount: { value: 1000, currency: "EUR" }, eventCode: "CAPTURE", success: "true", eventDate: "2026-01-01T00:00:00Z" };
  item.additionalData = { hmacSignature: adyen.calculateHmac(item, ADYEN) };
  return { headers: { "content-type": "application/json" }, body: JSON.stringify({ live: "false", notificationItems: [{ NotificationRequestItem: item }] }) };
}, { bend: (sent) => ({ ...sent, body: sent.body.replace("1000", "1001") }) });
await checks("adyen-platform", "@adyen/api-library", ADYEN, ({ text, headers }) => adyen.validateHMACSignature(ADYEN, headers.hmacsignature, text));

// SendGrid
const { EventWebhook } = require("@sendgrid/eventwebhook");
const p256 = generateKeyPairSync("ec", { namedCurve: "P-256" });
const p256Public = p256.publicKey.export({ type: "spki", format: "der" }).toString("base64");
const eventWebhook = new EventWebhook();
await checks("sendgrid", "@sendgrid/eventwebhook", p256.privateKey.export({ type: "pkcs8", format: "pem" }), ({ body, headers }) =>
  eventWebhook.verifySignature(eventWebhook.convertPublicKeyToECDSA(p256Public), body, headers["x-twilio-email-event-webhook-signature"], headers["x-twilio-email-event-webhook-timestamp"]));

// Paddle
const { Paddle } = require("@paddle/paddle-node-sdk");
await checks("paddle", "@paddle/paddle-node-sdk", "pdl_ntf_test", ({ text, headers }) => new Paddle("key").webhooks.isSignatureValid(text, "pdl_ntf_test", headers["paddle-signature"]));

// HubSpot, three versions
const { Signature } = require("@hubspot/api-client");
const HUBSPOT = "yyyyyyyy-yyyy-yyyy-yyyy-yyyyyyyyyyyy";
for (const [provider, version, header] of [["hubspot-v1", "v1", "x-hubspot-signature"], ["hubspot-v2", "v2", "x-hubspot-signature"], ["hubspot", "v3", "x-hubspot-signature-v3"]]) {
  const options = (body, timestamp) => ({ clientSecret: HUBSPOT, requestBody: body, url: address(provider), timestamp });
  await checks(provider, "@hubspot/api-client", HUBSPOT, ({ text, headers }) =>
    Signature.isValid({ method: "POST", signatureVersion: version, signature: headers[header], ...options(text, Number(headers["x-hubspot-request-timestamp"])) }));
  await signs(provider, "@hubspot/api-client", HUBSPOT, () => {
    const now = Date.now();
    return { headers: { "x-hubspot-signature-version": version, "x-hubspot-request-timestamp": String(now), [header]: Signature.getSignature("POST", version, options("[]", now)) }, body: "[]" };
  });
}

// Discord, Telnyx
const SEED = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
const PUBLIC = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
const { verifyKey } = require("discord-interactions");
await checks("discord", "discord-interactions", SEED, ({ text, headers }) => verifyKey(text, headers["x-signature-ed25519"], headers["x-signature-timestamp"], PUBLIC));
const Telnyx = require("telnyx");
const telnyx = new (Telnyx.default ?? Telnyx)({ apiKey: "key", publicKey: Buffer.from(PUBLIC, "hex").toString("base64") });
await checks("telnyx", "telnyx", Buffer.from(SEED, "hex").toString("base64"), async ({ text, headers }) => Boolean(await telnyx.webhooks.unwrap(text, { headers })));

// LINE, Coinbase Commerce, GoCardless
const { validateSignature } = require("@line/bot-sdk");
await checks("line", "@line/bot-sdk", "channel_secret", ({ text, headers }) => validateSignature(text, "channel_secret", headers["x-line-signature"]));
const coinbase = require("coinbase-commerce-node");
await checks("coinbase-commerce", "coinbase-commerce-node", "30291a20", ({ text, headers }) => { coinbase.Webhook.verifySigHeader(text, headers["x-cc-webhook-signature"], "30291a20"); });
const gocardless = require("gocardless-nodejs");
await checks("gocardless", "gocardless-nodejs", "ED7D658C", ({ text, headers }) => Boolean(gocardless.parse(text, "ED7D658C", headers["webhook-signature"])));

// Notion
const notion = require("@notionhq/client");
await checks("notion", "@notionhq/client", "secret_tok", ({ text, headers }) => notion.verifyWebhookSignature({ body: text, signature: headers["x-notion-signature"], verificationToken: "secret_tok" }));
await signs("notion", "@notionhq/client", "secret_tok", async () => ({ headers: { "x-notion-signature": await notion.signWebhookPayload({ body: EVENT, verificationToken: "secret_tok" }) }, body: EVENT }));

// Braintree
const braintree = require("braintree");
const merchant = new braintree.BraintreeGateway({ environment: braintree.Environment.Development, merchantId: "m", publicKey: "integration_public_key", privateKey: "integration_private_key" });
await checks("braintree", "braintree", "integration_private_key", async ({ text }) => {
  const { bt_signature: signature, bt_payload: payload } = fields(text);
  return (await merchant.webhookNotification.parse(signature, payload)).kind === "subscription_charged_successfully";
}, { bend: (sent) => ({ ...sent, text: sent.text.replace("bt_payload=P", "bt_payload=Q") }) });
await signs("braintree", "braintree", "integration_private_key", () => {
  const sample = merchant.webhookTesting.sampleNotification(braintree.WebhookNotification.Kind.SubscriptionWentPastDue, "sub_1");
  return { headers: { "content-type": "application/x-www-form-urlencoded" }, body: new URLSearchParams(sample).toString() };
}, { extra: ["--param", "public_key=integration_public_key"], bend: (sent) => ({ ...sent, body: sent.body.replace("bt_payload=P", "bt_payload=Q").replace("bt_payload=I", "bt_payload=J") }) });

// Mollie, Chargebee
const { SignatureValidator } = require("mollie-api-typescript");
await checks("mollie", "mollie-api-typescript", "mollie-secret", async ({ text, headers }) => await new SignatureValidator("mollie-secret").validatePayload(text, headers["x-mollie-signature"]));
const { basicAuthValidator } = require("chargebee");
await checks("chargebee", "chargebee", "user:pa:ss", ({ headers }) => basicAuthValidator((user, password) => user === "user" && password === "pa:ss")(headers).then(() => true), {
  bend: (sent) => ({ ...sent, headers: { ...sent.headers, authorization: `Basic ${Buffer.from("user:pass").toString("base64")}` } }),
});

// Linear
const { LinearWebhookClient } = await import("@linear/sdk/webhooks");
await checks("linear", "@linear/sdk", "lin_wh_secret", ({ body, text, headers }) => new LinearWebhookClient("lin_wh_secret").verify(body, headers["linear-signature"], JSON.parse(text).webhookTimestamp));

// Dropbox Sign
const dropboxSign = require("@dropbox/sign");
const dropboxEvent = (text) => dropboxSign.EventCallbackRequest.init(JSON.parse(text.slice(text.indexOf("{"), text.lastIndexOf("}") + 1)));
await checks("dropbox-sign", "@dropbox/sign", "324e3b08", ({ text }) => dropboxSign.EventCallbackHelper.isValid("324e3b08", dropboxEvent(text)), {
  bend: (sent) => ({ ...sent, text: sent.text.replace("signature_request_viewed", "signature_request_signed") }),
});

// Mux, Sanity, Webflow
const Mux = require("@mux/mux-node");
const mux = new (Mux.default ?? Mux)({ tokenId: "a", tokenSecret: "b" });
await checks("mux", "@mux/mux-node", "muxsecret", async ({ text, headers }) => { await mux.webhooks.verifySignature(text, headers, "muxsecret"); });
const sanity = await import("@sanity/webhook");
await checks("sanity", "@sanity/webhook", "sanitysecret", ({ text, headers }) => sanity.isValidSignature(text, headers["sanity-webhook-signature"], "sanitysecret"));
await signs("sanity", "@sanity/webhook", "sanitysecret", async () => ({ headers: { "sanity-webhook-signature": await sanity.encodeSignatureHeader(EVENT, Date.now(), "sanitysecret") }, body: EVENT }));
const { WebflowClient } = require("webflow-api");
await checks("webflow", "webflow-api", "wfsecret", ({ text, headers }) => new WebflowClient({ accessToken: "x" }).webhooks.verifySignature({ headers, body: text, secret: "wfsecret" }));

// Mercado Pago
const mercadoPago = require("mercadopago");
await checks("mercado-pago", "mercadopago", "mpsecret", ({ headers, url }) => {
  const dataId = new URL(url).searchParams.get("data.id");
  mercadoPago.WebhookSignatureValidator.validate({ xSignature: headers["x-signature"], xRequestId: headers["x-request-id"], dataId, secret: "mpsecret", toleranceSeconds: 300 });
}, { bend: (sent) => ({ ...sent, url: sent.url.replace("999999999", "999999998") }) });

// EasyPost, Pusher, Plivo
const EasyPost = require("@easypost/api");
const easypost = new (EasyPost.default ?? EasyPost)("key");
await checks("easypost", "@easypost/api", "ezsecret", ({ body, headers }) => Boolean(easypost.Utils.validateWebhook(body, headers, "ezsecret")), {
  bend: (sent) => ({ ...sent, body: Buffer.from(sent.text.replace("delivered", "lost")) }),
});
const Pusher = require("pusher");
const pusher = new Pusher({ appId: "1", key: "123456789", secret: "tofu" });
await checks("pusher", "pusher", "tofu", ({ text, headers }) => pusher.webhook({ headers, rawBody: text }).isValid());
const plivo = require("plivo");
await checks("plivo", "plivo", "plivotoken", ({ text, headers, url }) => plivo.validateV3Signature("POST", url, headers["x-plivo-signature-v3-nonce"], "plivotoken", headers["x-plivo-signature-v3"], fields(text)), {
  bend: (sent) => ({ ...sent, text: sent.text.replace("delivered", "failed") }),
});

// Bird, QStash, LiveKit
const bird = require("messagebird/lib/webhook-signature-jwt");
const birdKey = createSecretKey(Buffer.from("birdsecret"));
await checks("bird", "messagebird", "birdsecret", ({ body, headers, url }) => bird.verify(url, body, headers["messagebird-signature-jwt"], birdKey));
const { Receiver } = require("@upstash/qstash");
await checks("qstash", "@upstash/qstash", "qskey", ({ text, headers, url }) => new Receiver({ currentSigningKey: "qskey", nextSigningKey: "other" }).verify({ signature: headers["upstash-signature"], body: text, url }));
const { WebhookReceiver } = await import("livekit-server-sdk");
await checks("livekit", "livekit-server-sdk", "lksecret", async ({ text, headers }) => Boolean(await new WebhookReceiver("APIwLeah7g4fuLYDYAJeaKsSe", "lksecret").receive(text, headers.authorization)));

// Contentful
const contentful = require("@contentful/node-apps-toolkit");
const CONTENTFUL = "z".repeat(64);
const canonical = ({ headers, text }) => ({ method: "POST", path: "/webhooks/contentful", headers, body: text });
await checks("contentful", "@contentful/node-apps-toolkit", CONTENTFUL, (sent) => contentful.verifyRequest(CONTENTFUL, canonical(sent), 30));
await signs("contentful", "@contentful/node-apps-toolkit", CONTENTFUL, () => {
  const headers = { "x-contentful-topic": "t" };
  const added = contentful.signRequest(CONTENTFUL, { method: "POST", path: "/webhooks/contentful", headers, body: EVENT }, Date.now());
  return { headers: { ...headers, ...added }, body: EVENT };
});

// Atlassian Connect
const atlassian = require("@atlassian/atlassian-jwt");
const connectRequest = atlassian.fromMethodAndUrl("POST", "/webhooks/atlassian-connect?b=2&a=1");
await signs("atlassian-connect", "@atlassian/atlassian-jwt", "shared", () => {
  const claims = { iss: "tenant", iat: seconds(), exp: seconds() + 180, qsh: atlassian.createQueryStringHash(connectRequest, false) };
  return { headers: { authorization: `JWT ${atlassian.encodeSymmetric(claims, "shared")}` }, body: EVENT, query: "b=2&a=1" };
}, { bend: (sent) => ({ ...sent, query: "b=2&a=2" }) });
await checks("atlassian-connect", "@atlassian/atlassian-jwt", "shared", ({ headers, path }) => {
  const claims = atlassian.decodeSymmetric(headers.authorization.slice(4), "shared", atlassian.SymmetricAlgorithm.HS256);
  return claims.qsh === atlassian.createQueryStringHash(atlassian.fromMethodAndUrl("POST", path), false);
}, { bend: (sent) => ({ ...sent, path: `${sent.path}?x=1` }) });

// OpenAI, Resend, Replicate
const OpenAI = require("openai");
const openai = new (OpenAI.default ?? OpenAI)({ apiKey: "key", webhookSecret: WHSEC });
await checks("openai", "openai", WHSEC, async ({ text, headers }) => { await openai.webhooks.verifySignature(text, headers); });
const { Resend } = require("resend");
await checks("resend", "resend", WHSEC, ({ text, headers }) =>
  Boolean(new Resend("key").webhooks.verify({ payload: text, headers: { id: headers["svix-id"], timestamp: headers["svix-timestamp"], signature: headers["svix-signature"] }, webhookSecret: WHSEC })));
const { validateWebhook } = require("replicate");
await checks("replicate", "replicate", WHSEC, ({ text, headers }) => validateWebhook({ id: headers["webhook-id"], timestamp: headers["webhook-timestamp"], signature: headers["webhook-signature"], body: text, secret: WHSEC }));

process.exit(failures === 0 ? 0 : 1);
