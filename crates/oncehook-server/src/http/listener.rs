//! The accept loop of both listeners: deadlines, a cap on connections, and an orderly end.
//!
//! HTTP/1.1 only. A request's head must arrive within its deadline, and an idle connection is closed after the same time,
//! so a client that just sits there costs a socket for seconds, not for ever.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use oncehook::observe::Metrics;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use super::api::input::Peer;
use super::gate::Gate;
use super::ingest;
use super::tap::{Tap, Tapped};
use crate::config::Limits;

/// Largest head of a request.
const HEAD_BYTES: usize = 16 << 10;

/// How long open connections may take to finish after the end was announced.
const DRAIN: Duration = Duration::from_secs(10);

/// Serves webhooks until `end` turns true, then lets open requests finish.
pub async fn serve_ingress(listener: TcpListener, gate: Arc<Gate>, end: watch::Receiver<bool>) {
    let limits = gate.limits.clone();
    let metrics = Arc::clone(&gate.metrics);
    let service = move |peer, tap| ingest::service(Arc::clone(&gate), peer, tap);
    serve(listener, &limits, Some(metrics), service, end).await;
}

/// Serves the admin routes until `end` turns true.
pub async fn serve_admin(listener: TcpListener, router: Router, limits: Limits, end: watch::Receiver<bool>) {
    let service = move |peer, _| {
        let router = TowerToHyperService::new(router.clone());
        service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(Peer(peer));
            router.call(request)
        })
    };
    serve(listener, &limits, None, service, end).await;
}

async fn serve<S, B>(
    listener: TcpListener,
    limits: &Limits,
    metrics: Option<Arc<Metrics>>,
    service: impl Fn(SocketAddr, Arc<Tap>) -> S,
    mut end: watch::Receiver<bool>,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let places = Arc::new(Semaphore::new(limits.connections));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(4 * HEAD_BYTES)
        .half_close(false);
    let mut ending = end.clone();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ended(&mut ending) => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                pause_after(&error).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            if let Some(metrics) = &metrics {
                metrics.count_shed("connections");
            }
            tokio::spawn(turn_away(stream));
            continue;
        };
        // Answers are small and must not wait for more.
        let _ = stream.set_nodelay(true);
        let tap = Arc::new(Tap::default());
        let io = TokioIo::new(Tapped::new(stream, Arc::clone(&tap)));
        let connection = http.serve_connection(io, service(peer, tap));
        let (mut end, metrics) = (end.clone(), metrics.clone());
        tokio::spawn(async move {
            let _place = place;
            if let Some(metrics) = &metrics {
                metrics.connections.inc();
            }
            let mut connection = pin!(connection);
            let outcome = tokio::select! {
                outcome = connection.as_mut() => outcome,
                () = ended(&mut end) => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = outcome {
                // The peer's doing: a hang-up, a timeout, nonsense on the wire.
                tracing::debug!(%peer, %error, "connection ended");
            }
            if let Some(metrics) = &metrics {
                metrics.connections.dec();
            }
        });
    }
    drop(listener);
    end.mark_changed();
    let all = u32::try_from(limits.connections).unwrap_or(u32::MAX);
    // All places free again means that every connection has ended.
    if tokio::time::timeout(DRAIN, places.acquire_many(all)).await.is_err() {
        tracing::warn!("connections were still open at the end; they get no further answers");
    }
}

/// Returns when the end was announced, or whoever could announce it is gone.
pub(crate) async fn ended(end: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is an end too.
    let _ = end.wait_for(|end| *end).await;
}

/// Says 503 to a connection beyond the cap, without reading it.
async fn turn_away(mut stream: TcpStream) {
    const ANSWER: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\nconnection: close\r\n\
        content-type: application/json\r\ncontent-length: 82\r\n\r\n\
        {\"error\":{\"code\":\"connections\",\"message\":\"too many connections; try again later\"}}";
    let farewell = async {
        // The peer may be gone already, which is as good.
        let _ = stream.write_all(ANSWER).await;
        let _ = stream.shutdown().await;
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), farewell).await;
}

/// Out of file descriptors and the like: wait for some to come back rather than spin.
async fn pause_after(error: &io::Error) {
    let peers_fault =
        matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset);
    if !peers_fault {
        tracing::error!(%error, "accepting a connection failed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
