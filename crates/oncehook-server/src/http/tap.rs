//! A copy of a request's head as it came over the wire.
//!
//! hyper follows the standard for a request with both `Content-Length` and `Transfer-Encoding`: it drops the length, reads
//! chunks and closes the connection. We refuse such a request, because only somebody who plays with proxies sends one, and
//! for that we must see what hyper has dropped. The tap keeps the first bytes since the last answer; it is looked at only
//! for the rare chunked request.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// More than any head that the listener accepts.
const KEPT: usize = 32 << 10;

/// The bytes read since the last [`reset`](Self::reset), up to a limit.
#[derive(Debug, Default)]
pub(super) struct Tap(Mutex<Vec<u8>>);

impl Tap {
    fn record(&self, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let room = KEPT.saturating_sub(kept.len()).min(bytes.len());
        kept.extend_from_slice(bytes.get(..room).unwrap_or_default());
    }

    /// Called when a request has been answered: what comes now belongs to the next one.
    pub(super) fn reset(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Whether the current request is plainly chunked: its head is here from its first byte and names no length. A
    /// request that was sent before the last one was answered is not here in full, and counts as not plain.
    ///
    /// `headers` is how many headers hyper has found. Of a head whose beginning is not here at least one more was found
    /// than stands here, however the rest is made to look.
    pub(super) fn is_plainly_chunked(&self, method: &str, headers: usize) -> bool {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let head = kept.trim_ascii_start();
        let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") else { return false };
        let head = head.get(..end).unwrap_or_default();
        let lines = head.split(|byte| *byte == b'\n').count();
        head.starts_with(method.as_bytes())
            && lines == headers + 1
            && !head.split(|byte| *byte == b'\n').any(|line| {
                let name = line.split(|byte| *byte == b':').next().unwrap_or_default();
                name.trim_ascii().eq_ignore_ascii_case(b"content-length")
            })
    }
}

/// A stream whose reads are copied to a [`Tap`].
pub(super) struct Tapped<S> {
    inner: S,
    tap: Arc<Tap>,
}

impl<S> Tapped<S> {
    pub(super) fn new(inner: S, tap: Arc<Tap>) -> Self {
        Self { inner, tap }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Tapped<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(cx, buf);
        self.tap.record(buf.filled().get(before..).unwrap_or_default());
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Tapped<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
