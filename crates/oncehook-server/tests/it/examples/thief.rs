//! Somebody on the way between a gateway and a receiver who steals an answer when told.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::IN_THE_END;

/// Stands between the gateway and the receiver, passes everything on, and tells when a request has gone through. It can steal
/// an answer: then the receiver has committed, and the gateway hears nothing.
pub(super) struct Thief {
    pub(super) address: SocketAddr,
    wanted: watch::Sender<Option<Booty>>,
    task: JoinHandle<()>,
}

/// What is stolen from the next request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Booty {
    Nothing,
    Answer,
}

impl Thief {
    pub(super) async fn start(receiver: SocketAddr) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let wanted = watch::Sender::new(None);
        let thief = wanted.clone();
        let task = tokio::spawn(async move {
            let mut passing = JoinSet::new();
            while let Ok((gateway, _)) = listener.accept().await {
                let wanted = thief.clone();
                passing.spawn(async move {
                    // The receiver may be dead at the moment; then the gateway finds its connection closed.
                    if let Ok(receiver) = TcpStream::connect(receiver).await {
                        pass(gateway, receiver, &wanted).await;
                    }
                });
                while passing.try_join_next().is_some() {}
            }
        });
        Self { address, wanted, task }
    }

    /// Waits until a request has gone through, or its answer is stolen.
    pub(super) async fn wait_for(&self, booty: Booty) {
        self.wanted.send_replace(Some(booty));
        let mut done = self.wanted.subscribe();
        let done = tokio::time::timeout(IN_THE_END, done.wait_for(Option::is_none)).await;
        assert!(done.is_ok(), "no request came through");
    }
}

impl Drop for Thief {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Passes bytes on until one side is done, or an answer is stolen.
async fn pass(mut gateway: TcpStream, mut receiver: TcpStream, wanted: &watch::Sender<Option<Booty>>) {
    // Whether this was wanted; only one connection is told so.
    let take = |booty: Booty| wanted.send_if_modified(|wanted| wanted.take_if(|wanted| *wanted == booty).is_some());
    let (mut request, mut answer) = ([0; 4096], [0; 4096]);
    loop {
        tokio::select! {
            read = gateway.read(&mut request) => match read {
                Ok(count) if count > 0 && receiver.write_all(&request[..count]).await.is_ok() => {
                    take(Booty::Nothing);
                }
                _ => return,
            },
            read = receiver.read(&mut answer) => match read {
                Ok(count) if count > 0 && !take(Booty::Answer) => {
                    if gateway.write_all(&answer[..count]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
        }
    }
}
