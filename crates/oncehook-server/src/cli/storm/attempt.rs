//! One delivery attempt, as a patient sender makes it or as one that goes away.
//!
//! Promises: a sender that goes away does so after the last byte of its request has been handed to the connection, and closes
//! that connection; a request without an answer is an ending like any other, never an error of the storm.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::oneshot;

use super::super::client::{cause, http_client};
use super::super::send::{Ready, post};

/// What even the most impatient sender waits after its last byte, so that it leaves the machine.
const LEAVING: Duration = Duration::from_millis(10);

/// Makes attempts.
pub(super) struct Sender {
    http: reqwest::Client,
}

/// How an attempt ended, as the sender sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ending {
    /// With this status.
    Answered(u16),
    /// The sender went away.
    Cut,
    /// No connection, or no answer.
    Failed(String),
}

impl Ending {
    /// Whether the sender believes that the event has arrived.
    pub(super) fn is_acknowledged(&self) -> bool {
        matches!(self, Self::Answered(200..=299))
    }
}

impl Sender {
    pub(super) fn new(secure: bool, connections: usize) -> anyhow::Result<Self> {
        Ok(Self { http: http_client(secure, connections)? })
    }

    /// Sends and waits for the answer.
    pub(super) async fn whole(&self, ready: Ready) -> Ending {
        ending(post(&self.http, ready.url, ready.headers, ready.body).await)
    }

    /// Sends, and goes away if the answer is not there after `hold`.
    pub(super) async fn cut(&self, ready: Ready, hold: Duration) -> Ending {
        let (told, handed_over) = oneshot::channel();
        let body = reqwest::Body::wrap(Told { body: Full::new(ready.body), told: Some(told) });
        let exchange = post(&self.http, ready.url, ready.headers, body);
        let leave = async {
            // Without a word there is no connection, and the exchange says so.
            if handed_over.await.is_err() {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(hold.max(LEAVING)).await;
        };
        tokio::select! {
            answer = exchange => ending(answer),
            () = leave => Ending::Cut,
        }
    }
}

fn ending(answer: Result<super::super::tally::Answer, reqwest::Error>) -> Ending {
    match answer {
        Ok(answer) => Ending::Answered(answer.status.as_u16()),
        Err(error) => Ending::Failed(cause(&error)),
    }
}

/// A body that tells when its last byte has been handed over.
struct Told {
    body: Full<Bytes>,
    told: Option<oneshot::Sender<()>>,
}

impl Body for Told {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if let Some(told) = self.told.take_if(|_| frame.is_ready()) {
            // Nobody listens any more if the answer was faster.
            let _ = told.send(());
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
