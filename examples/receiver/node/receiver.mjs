// A receiver: writes a row into `payments` for every payment that oncehook forwards, once.
//
//     node receiver.mjs [PORT [DATABASE [SECRET_FILE]]]

import { Inbox, readSecret, serve } from "./once.mjs";

// On purpose without a unique column: if a webhook took effect twice, two rows would show it.
const SCHEMA = `
CREATE TABLE IF NOT EXISTS payments (
  id INTEGER PRIMARY KEY,
  payment TEXT NOT NULL,
  amount INTEGER NOT NULL
);
`;

function recordPayment(database, event) {
  const payment = event.data.object;
  const insert = database.prepare("INSERT INTO payments (payment, amount) VALUES (?, ?)");
  return { payment: Number(insert.run(payment.id, payment.amount).lastInsertRowid) };
}

const [port = "9000", database = "receiver.db", secretFile = "receiver.secret"] = process.argv.slice(2);
serve(Number(port), new Inbox(database, SCHEMA), readSecret(secretFile), recordPayment);
