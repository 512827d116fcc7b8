//! The accept loop of both listeners: deadlines, a cap on connections, and an orderly end.
//!
//! HTTP/1.1 only. A request's head must arrive within its deadline, its answer must be taken within another, and an idle
//! connection is closed in time, so a client that just sits there costs a socket for seconds, not for ever. When all
//! places are taken, the idlest connection makes room (`connections.rs`).

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

use super::api::input::Peer;
use super::connections::{Connection, Connections};
use super::gate::Gate;
use super::ingest;
use super::rejections::Refusal;
use super::wire::Wire;
use crate::config::Limits;

/// Largest head of a request, and the most that hyper reads at once: its buffers are memory that no budget counts.
const HEAD_BYTES: usize = 16 << 10;

/// Connections that wait to be accepted. The system may have a lower limit (`net.core.somaxconn`).
const BACKLOG: u32 = 4_096;

/// What the system holds of the answers on a connection of the front door, which are short. Its own choice may be megabytes,
/// so a sender that reads none would have thousands of requests answered.
const SEND_BUFFER: usize = 16 << 10;

/// How long open connections may take to finish after the end was announced.
const DRAIN: Duration = Duration::from_secs(10);

/// Listens on an address.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restart must not wait for the connections of the process before.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves webhooks until `end` turns true, then lets open requests finish.
pub async fn serve_ingress(listener: TcpListener, gate: Arc<Gate>, end: watch::Receiver<bool>) {
    let limits = gate.limits.clone();
    let front = Arc::clone(&gate);
    bound_answers(&listener);
    let service = move |connection| ingest::service(Arc::clone(&front), connection);
    serve(listener, &limits, Some(gate), service, end).await;
}

/// Serves the admin routes until `end` turns true.
pub async fn serve_admin(listener: TcpListener, router: Router, limits: Limits, end: watch::Receiver<bool>) {
    let service = move |connection: Arc<Connection>| {
        let router = TowerToHyperService::new(router.clone());
        service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(Peer(connection.peer));
            // Nobody reads its head again.
            connection.tap.close(false);
            let stays = connection.begin() && connection.complete();
            let (answering, connection) = (router.call(request), Arc::clone(&connection));
            async move {
                if !stays {
                    // Its task is being ended.
                    std::future::pending::<()>().await;
                }
                let answer = answering.await?;
                if answer.status().is_success() {
                    connection.mark_genuine(Instant::now());
                }
                connection.end();
                connection.tap.reset(false);
                Ok(answer)
            }
        })
    };
    serve(listener, &limits, None, service, end).await;
}

async fn serve<S, B>(
    listener: TcpListener,
    limits: &Limits,
    gate: Option<Arc<Gate>>,
    service: impl Fn(Arc<Connection>) -> S,
    end: watch::Receiver<bool>,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    end_lost_connections(&listener, limits.write);
    let connections =
        Connections::new(limits.connections, limits.head, gate.as_ref().map(|gate| Arc::clone(&gate.metrics)));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(HEAD_BYTES)
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
        let Some(place) = connections.place() else {
            if let Some(gate) = &gate {
                gate.refuse(None, peer.ip(), Refusal::no_connection());
            }
            tokio::spawn(turn_away(stream));
            continue;
        };
        // Answers are small and must not wait for more.
        let _ = stream.set_nodelay(true);
        connections.run(peer, |connection, entry| {
            let (http, service) = (http.clone(), service(Arc::clone(&connection)));
            let connections = Arc::clone(&connections);
            let (mut end, gate, patience) = (end.clone(), gate.clone(), limits.write);
            async move {
                let _entry = entry;
                let Some(_place) = place.get().await else {
                    if let Some(gate) = &gate {
                        gate.refuse(None, peer.ip(), Refusal::no_connection());
                    }
                    return turn_away(stream).await;
                };
                let io = TokioIo::new(Wire::new(stream, connections, Arc::clone(&connection), patience));
                let mut serving = pin!(http.serve_connection(io, service));
                let outcome = tokio::select! {
                    outcome = serving.as_mut() => outcome,
                    () = ended(&mut end) => {
                        serving.as_mut().graceful_shutdown();
                        serving.await
                    }
                };
                if let Err(error) = outcome {
                    // The peer's doing: a hang-up, a timeout, nonsense on the wire.
                    tracing::debug!(%peer, %error, "connection ended");
                    let refusal = Refusal::of_connection(&error, connection.tap.has_begun());
                    if let Some((gate, refusal)) = gate.as_ref().zip(refusal) {
                        gate.refuse(None, peer.ip(), refusal);
                    }
                }
            }
        });
    }
    drop(listener);
    if tokio::time::timeout(DRAIN, connections.wait_for_end(limits.connections)).await.is_err() {
        tracing::warn!("connections were still open at the end; they get no further answers");
    }
}

/// Connections inherit the listener's options. One whose peer takes nothing that was sent, and does not even say so, is ended by the system.
fn end_lost_connections(listener: &TcpListener, after: Duration) {
    let millis = u32::try_from(after.as_millis()).unwrap_or(u32::MAX);
    if let Err(error) = sockopt::set_tcp_user_timeout(listener, millis) {
        tracing::warn!(%error, "TCP_USER_TIMEOUT could not be set; lost connections are noticed later");
    }
}

/// Connections inherit this too.
fn bound_answers(listener: &TcpListener) {
    if let Err(error) = sockopt::set_socket_send_buffer_size(listener, SEND_BUFFER) {
        tracing::warn!(%error, "the send buffer could not be bounded; unread answers take more memory");
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
    let peers_fault = matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset);
    if !peers_fault {
        tracing::error!(%error, "accepting a connection failed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn fault_76_connections_inherit_what_bounds_unread_answers() {
        let listener = bind(([127, 0, 0, 1], 0).into()).await.unwrap();
        end_lost_connections(&listener, Duration::from_secs(7));
        bound_answers(&listener);
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        assert_eq!(sockopt::tcp_user_timeout(&stream), Ok(7_000));
        // The system counts its own bookkeeping in, so it doubles the number.
        assert_eq!(sockopt::socket_send_buffer_size(&stream), Ok(2 * SEND_BUFFER));
    }
}
