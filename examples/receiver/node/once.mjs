// Commits each webhook that oncehook forwards once, in this application's own database.
//
// Promises: nothing unsigned touches the database; the key and the effect commit together or not at all; a repeat is
// answered with what the first one was answered, with 200 and never with an error; 503 means that nothing was committed,
// or that nobody knows, and that trying again is safe.
//
// Does not: anything outside its database. An effect that leaves it (a mail, a call) belongs into a table of things to do,
// written in the same transaction, or into a route of its own in oncehook.
//
// Node 22.13 or newer, no packages. docs/RECEIVER.md tells the same for other databases.

import { createHmac, timingSafeEqual } from "node:crypto";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { DatabaseSync } from "node:sqlite";

const TOLERANCE_SECONDS = 300;
const LARGEST_BODY_BYTES = 1 << 20;

const TABLE = `
CREATE TABLE IF NOT EXISTS received_webhooks (
  idempotency_key TEXT PRIMARY KEY,
  received_at INTEGER NOT NULL DEFAULT (unixepoch()),
  answer TEXT
) WITHOUT ROWID;
`;
const TAKE = `
INSERT INTO received_webhooks (idempotency_key) VALUES (:key)
ON CONFLICT (idempotency_key) DO NOTHING
`;
const KEEP = "UPDATE received_webhooks SET answer = :answer WHERE idempotency_key = :key";
const FIND = "SELECT answer FROM received_webhooks WHERE idempotency_key = :key";

/** The request is not from our gateway, or not from now. */
export class Rejected extends Error {}

/** Checks a Standard Webhooks signature over the raw body and returns the idempotency key, which it covers. */
export function verify(secret, headers, body, now) {
  const key = headers["webhook-id"] ?? "";
  const timestamp = headers["webhook-timestamp"] ?? "";
  if (key === "" || !/^[0-9]{1,15}$/.test(timestamp)) {
    throw new Rejected("webhook-id or webhook-timestamp is missing");
  }
  if (Math.abs(now - Number(timestamp)) > TOLERANCE_SECONDS) {
    throw new Rejected("webhook-timestamp is too old or too new");
  }
  const mac = createHmac("sha256", secret).update(`${key}.${timestamp}.`).update(body);
  const expected = Buffer.from(`v1,${mac.digest("base64")}`);
  const given = (headers["webhook-signature"] ?? "").split(" ").map((one) => Buffer.from(one));
  if (!given.some((one) => one.length === expected.length && timingSafeEqual(one, expected))) {
    throw new Rejected("webhook-signature does not fit");
  }
  // Idempotency-Key is the same text, but only webhook-id is signed.
  if ((headers["idempotency-key"] ?? key) !== key) {
    throw new Rejected("idempotency-key is not webhook-id");
  }
  return key;
}

/** The application's database with its table of keys. node:sqlite does not yield, so one request writes at a time. */
export class Inbox {
  constructor(path, schema) {
    this.database = new DatabaseSync(path);
    this.database.exec("PRAGMA busy_timeout = 5000; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;");
    this.database.exec(TABLE + schema);
    this.take = this.database.prepare(TAKE);
    this.keep = this.database.prepare(KEEP);
    this.find = this.database.prepare(FIND);
  }

  /** Runs effect(database) unless the key is known. Returns its answer, as JSON text, and whether it is a repeat. */
  once(key, effect) {
    this.database.exec("BEGIN IMMEDIATE");
    try {
      const repeat = this.take.run({ key }).changes === 0;
      let answer;
      if (repeat) {
        answer = this.find.get({ key }).answer;
      } else {
        answer = JSON.stringify(effect(this.database));
        this.keep.run({ answer, key });
      }
      this.database.exec("COMMIT");
      return { answer, repeat };
    } catch (error) {
      if (this.database.isTransaction) this.database.exec("ROLLBACK");
      throw error;
    }
  }
}

/** Answers webhooks until the process ends. effect(database, event) makes the changes and returns the answer. */
export function serve(port, inbox, secret, effect) {
  const server = createServer(async (request, response) => {
    const reply = (status, answer) => {
      const body = Buffer.from(typeof answer === "string" ? answer : JSON.stringify(answer));
      response.writeHead(status, { "content-type": "application/json", "content-length": body.length });
      response.end(body);
    };
    const body = await read(request).catch(() => null);
    if (body === null) {
      response.shouldKeepAlive = false;
      return reply(413, { error: "too large, or broken off" });
    }
    let key, event;
    try {
      key = verify(secret, request.headers, body, Date.now() / 1000);
      event = JSON.parse(body);
    } catch (error) {
      if (error instanceof Rejected) return reply(401, { error: error.message });
      return reply(400, { error: "the body is not JSON" });
    }
    try {
      const { answer, repeat } = inbox.once(key, (database) => effect(database, event));
      console.error(`${repeat ? "repeat" : "applied"} ${key}`);
      reply(200, answer);
    } catch (error) {
      console.error(`failed ${key}: ${error}`);
      reply(503, { error: "nothing was committed; try again" });
    }
  });
  server.listen(port, "127.0.0.1", () => console.error(`listening on http://127.0.0.1:${port}`));
}

/** The raw body, byte for byte: the signature is over these bytes and no others. */
async function read(request) {
  const parts = [];
  let length = 0;
  for await (const part of request) {
    length += part.length;
    if (length > LARGEST_BODY_BYTES) throw new Error("too large");
    parts.push(part);
  }
  return Buffer.concat(parts);
}

/** The bytes that sign: what follows whsec_ is base64. */
export function readSecret(path) {
  return Buffer.from(readFileSync(path, "ascii").trim().replace(/^whsec_/, ""), "base64");
}
