"""Official libraries for Python against oncehook, both ways. Prints one line per provider and direction, as check.mjs does."""

import json
import os
import subprocess
import sys
import tempfile
import time
import types
import urllib.parse

BINARY = os.environ["ONCEHOOK"]
EVENT = '{"id":"evt_1","type":"demo.created","data":{"object":{"id":"obj_1"}}}'
WHSEC = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
failures = 0


def address(provider):
    return f"https://gateway.example/webhooks/{provider}"


def oncehook(args, secret):
    env = {**os.environ, "CONFORMANCE_SECRET": secret}
    return subprocess.run([BINARY, *args], env=env, capture_output=True, check=False)


def signed_by(provider, secret, extra=()):
    args = ["send", "--provider", provider, "--secret", "env:CONFORMANCE_SECRET", "--print"]
    done = oncehook([*args, "--url", address(provider), "--key", "evt_1", *extra], secret)
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    head, body = done.stdout.split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    return types.SimpleNamespace(headers=headers, body=body, text=body.decode(), url="https://gateway.example" + lines[0].split(" ")[1])


def accepted_by_oncehook(provider, secret, headers, body, query="", extra=()):
    line = f"POST /webhooks/{provider}{'?' + query if query else ''} HTTP/1.1"
    head = "\r\n".join([line, *(f"{name}: {value}" for name, value in headers.items())])
    with tempfile.NamedTemporaryFile() as file:
        file.write(head.encode() + b"\r\n\r\n" + body.encode())
        file.flush()
        args = ["verify", "--provider", provider, "--secret", "env:CONFORMANCE_SECRET", "--request", file.name]
        done = oncehook([*args, "--public-url", address(provider), "--json", *extra], secret)
    return json.loads(done.stdout)["genuine"]


def report(provider, library, direction, ok, why=""):
    global failures
    failures += not ok
    print("ok" if ok else "FAILED", provider, library, direction, why, flush=True)


def holds(check, sent):
    try:
        return check(sent) is not False
    except Exception:
        return False


def checks(provider, library, secret, check, bend=lambda text: text + " ", extra=()):
    try:
        sent = signed_by(provider, secret, extra)
        genuine = holds(check, sent)
        bent = types.SimpleNamespace(**vars(sent))
        bent.text = bend(sent.text)
        bent.body = bent.text.encode()
        forged = holds(check, bent)
        report(provider, library, "checks", genuine and not forged, "" if genuine and not forged else f"({genuine=} {forged=})")
    except Exception as error:
        report(provider, library, "checks", False, repr(error)[:300])


def signs(provider, library, secret, headers, body, bend=lambda body: body + " ", query="", extra=()):
    try:
        genuine = accepted_by_oncehook(provider, secret, headers, body, query, extra)
        forged = accepted_by_oncehook(provider, secret, headers, bend(body), query, extra)
        report(provider, library, "signs", genuine and not forged, "" if genuine and not forged else f"({genuine=} {forged=})")
    except Exception as error:
        report(provider, library, "signs", False, repr(error)[:300])


def fields(text):
    return dict(urllib.parse.parse_qsl(text))


now = int(time.time())

import stripe

checks("stripe", "stripe(py)", "whsec_test", lambda s: stripe.WebhookSignature.verify_header(s.text, s.headers["stripe-signature"], "whsec_test", 300))
header = stripe.WebhookSignature.generate_signature_header(EVENT, "whsec_test", timestamp=now)
signs("stripe", "stripe(py)", "whsec_test", {"stripe-signature": header}, EVENT)

import datetime

import standardwebhooks
import svix.webhooks

moment = datetime.datetime.now(tz=datetime.timezone.utc)
for provider, prefix, Webhook in (("standard-webhooks", "webhook", standardwebhooks.Webhook), ("svix", "svix", svix.webhooks.Webhook)):
    webhook = Webhook(WHSEC)
    checks(provider, f"{Webhook.__module__.split('.')[0]}(py)", WHSEC, lambda s, w=webhook: w.verify(s.text, s.headers) is not False)
    made = {f"{prefix}-id": "msg_1", f"{prefix}-timestamp": str(int(moment.timestamp())), f"{prefix}-signature": webhook.sign("msg_1", moment, EVENT)}
    signs(provider, f"{Webhook.__module__.split('.')[0]}(py)", WHSEC, made, EVENT)
checks("clerk", "svix(py)", WHSEC, lambda s: svix.webhooks.Webhook(WHSEC).verify(s.text, s.headers) is not False)

from twilio.request_validator import RequestValidator

validator = RequestValidator("12345")
checks("twilio", "twilio(py)", "12345", lambda s: validator.validate(s.url, fields(s.text), s.headers["x-twilio-signature"]), bend=lambda t: t.replace("delivered", "failed"))
params = {"CallSid": "CA1", "Digits": "1234", "From": "+14158675309"}
signs(
    "twilio", "twilio(py)", "12345",
    {"content-type": "application/x-www-form-urlencoded", "x-twilio-signature": validator.compute_signature(address("twilio") + "?foo=1", params)},
    urllib.parse.urlencode(params), bend=lambda body: body.replace("1234", "1235"), query="foo=1",
)

from slack_sdk.signature import SignatureVerifier

slack = SignatureVerifier("8f742231b10e8888abcd99yyyzzz85a5")
checks("slack", "slack_sdk", "8f742231b10e8888abcd99yyyzzz85a5", lambda s: slack.is_valid(s.text, s.headers["x-slack-request-timestamp"], s.headers["x-slack-signature"]))
signs("slack", "slack_sdk", "8f742231b10e8888abcd99yyyzzz85a5", {"x-slack-request-timestamp": str(now), "x-slack-signature": slack.generate_signature(timestamp=str(now), body=EVENT)}, EVENT)

from paddle_billing.Notifications import Secret, Verifier


def paddle_request(sent):
    headers = {"Paddle-Signature": sent.headers["paddle-signature"]}
    return types.SimpleNamespace(headers=headers, body=sent.body, content=sent.body, data=sent.body)


checks("paddle", "paddle-python-sdk", "pdl_ntf_test", lambda s: Verifier().verify(paddle_request(s), Secret("pdl_ntf_test")))

from mailgun.security import SecurityGuard


def mailgun(sent):
    signature = json.loads(sent.text)["signature"]
    return SecurityGuard.verify_webhook("key-mg", signature["token"], signature["timestamp"], signature["signature"])


checks("mailgun", "mailgun", "key-mg", mailgun, bend=lambda t: t.replace("50-evt_1", "51-evt_1"))

import braintree

gateway = braintree.BraintreeGateway(braintree.Configuration(braintree.Environment.Development, merchant_id="m", public_key="integration_public_key", private_key="integration_private_key"))
checks(
    "braintree", "braintree(py)", "integration_private_key",
    lambda s: gateway.webhook_notification.parse(fields(s.text)["bt_signature"], fields(s.text)["bt_payload"]).kind == "subscription_charged_successfully",
    bend=lambda t: t.replace("bt_payload=P", "bt_payload=Q"),
)
sample = gateway.webhook_testing.sample_notification(braintree.WebhookNotification.Kind.SubscriptionWentPastDue, "sub_1")
text = lambda value: value.decode() if isinstance(value, bytes) else value
signs(
    "braintree", "braintree(py)", "integration_private_key", {"content-type": "application/x-www-form-urlencoded"},
    urllib.parse.urlencode({name: text(value) for name, value in sample.items()}),
    bend=lambda body: body.replace("bt_payload=C", "bt_payload=D").replace("bt_payload=I", "bt_payload=J").replace("bt_payload=P", "bt_payload=Q"),
    extra=["--param", "public_key=integration_public_key"],
)

from linebot.v3.webhook import SignatureValidator

checks("line", "line-bot-sdk", "channel_secret", lambda s: SignatureValidator("channel_secret").validate(s.text, s.headers["x-line-signature"]))

from dropbox_sign import EventCallbackHelper
from dropbox_sign.models import EventCallbackRequest


def dropbox_sign(sent):
    document = json.loads(sent.text[sent.text.index("{") : sent.text.rindex("}") + 1])
    return EventCallbackHelper.is_valid("324e3b08", EventCallbackRequest.init(document))


checks("dropbox-sign", "dropbox-sign(py)", "324e3b08", dropbox_sign, bend=lambda t: t.replace("signature_request_viewed", "signature_request_signed"))

import easypost.util

checks("easypost", "easypost(py)", "ezsecret", lambda s: bool(easypost.util.validate_webhook(s.body, {"X-Hmac-Signature": s.headers["x-hmac-signature"]}, "ezsecret")), bend=lambda t: t.replace("delivered", "lost"))

sys.exit(1 if failures else 0)
