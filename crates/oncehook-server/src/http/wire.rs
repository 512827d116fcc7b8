//! A connection's stream: reads are shown to its [`Tap`](super::tap::Tap), and writes have a deadline.
//!
//! hyper has none: whoever sends requests and never reads the answers would hold the connection for ever.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::connections::{Connection, Connections, LongHead};

pub(super) struct Wire<S> {
    inner: S,
    connections: Arc<Connections>,
    connection: Arc<Connection>,
    /// Counts while a head is longer than usual.
    long_head: Option<LongHead>,
    /// How long the peer may take none of what is written.
    patience: Duration,
    /// Runs while a write waits.
    stuck: Option<Pin<Box<Sleep>>>,
}

impl<S> Wire<S> {
    pub(super) fn new(
        inner: S,
        connections: Arc<Connections>,
        connection: Arc<Connection>,
        patience: Duration,
    ) -> Self {
        Self { inner, connections, connection, long_head: None, patience, stuck: None }
    }

    /// A write that went on is as it is; one that waits fails when its time is over.
    fn within<T>(&mut self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            if self.stuck.take().is_some() {
                self.connection.set_stuck(false);
            }
            return written;
        }
        let (patience, connection) = (self.patience, &self.connection);
        let stuck = self.stuck.get_or_insert_with(|| {
            connection.set_stuck(true);
            Box::pin(tokio::time::sleep(patience))
        });
        stuck.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Wire<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.connection.tap.is_long() != self.long_head.is_some() {
            self.long_head = match self.long_head {
                None => Some(self.connections.count_long_head()),
                Some(_) => None,
            };
        }
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(cx, buf);
        self.connection.tap.record(buf.filled().get(before..).unwrap_or_default());
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.within(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.within(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        self.within(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.within(shut, cx)
    }
}
