//! Somebody at a terminal, who is asked before much is done.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use serde_json::json;

use super::{deliver, order, rig, until};
use crate::kit::{BINARY, Rig, text};

#[tokio::test]
async fn a_person_at_a_terminal_is_asked() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "gone").await;
    until(&rig, &event, "dead").await;
    // `script` gives the command a terminal.
    let ask = |answer: &str| {
        let mut child = Command::new("timeout")
            .args(["30", "script", "-qec", &format!("{BINARY} --config client.toml retry --status dead"), "/dev/null"])
            .current_dir(rig.directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "{answer}").unwrap();
        let output = child.wait_with_output().unwrap();
        drop(stdin);
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, said) = ask("n");
    assert!(code == 1 && said.contains("Go on?") && said.contains("nothing was done"), "{said}");
    assert_eq!(rig.show(&event).await["audit"], json!([]));
    let (code, said) = ask("y");
    assert!(code == 0 && said.contains("done: 1 found, 1 changed"), "{said}");
    assert_eq!(rig.show(&event).await["audit"].as_array().unwrap().len(), 1);
}

/// A terminal at which a command asks; `meanwhile` happens between the question and the answers.
async fn asked(rig: &Rig, command: &str, meanwhile: impl Future<Output = ()>, answers: &str) -> (i32, String) {
    let mut child = Command::new("timeout")
        .args(["30", "script", "-qec", &format!("{BINARY} --config client.toml {command}"), "/dev/null"])
        .current_dir(rig.directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut said = Vec::new();
    while !String::from_utf8_lossy(&said).contains("Go on?") {
        let mut byte = [0];
        stdout.read_exact(&mut byte).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&said)));
        said.push(byte[0]);
    }
    meanwhile.await;
    stdin.write_all(answers.as_bytes()).unwrap();
    stdout.read_to_end(&mut said).unwrap();
    drop(stdin);
    (child.wait().unwrap().code().unwrap(), String::from_utf8_lossy(&said).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_person_agreed_to_is_what_is_done() {
    let rig = rig();
    let dead = async |id: &str| {
        let event = deliver(&rig, id, "gone").await;
        until(&rig, &event, "dead").await;
        event
    };
    let first = dead("evt_1").await;
    // Another one comes while the person thinks: it was not shown, so it is not meant.
    let (code, said) = asked(&rig, "retry --status dead", async { drop(dead("evt_2").await) }, "y\n").await;
    assert!(code == 0 && said.contains("done: 1 found, 1 changed"), "{said}");
    until(&rig, &first, "dead").await;
    let listed = rig.gateway.json("/api/events?status=dead").await;
    let second = text(&listed["events"][0]["id"]);
    assert_eq!(rig.show(&second).await["audit"], json!([]));
    // One of the two goes meanwhile: what is left is shown again before anything is done.
    let skip = async { drop(order(&rig, &format!("/api/events/{second}/skip"), &json!({})).await) };
    let (code, said) = asked(&rig, "retry --status dead", skip, "y\nn\n").await;
    assert!(said.contains("retry: 2 events") && said.contains("finds 1 events now, not 2"), "{said}");
    assert!(code == 1 && said.contains("retry: 1 event\r\n") && said.contains("nothing was done"), "{said}");
    assert_eq!(rig.show(&first).await["audit"].as_array().unwrap().len(), 1);
}
