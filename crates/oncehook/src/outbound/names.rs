//! The one door through which DNS enters, with the guard standing in it.
//!
//! Promises: every address of a name is judged each time the name is looked up, and the client connects to the judged
//! addresses and to no others: there is no second look-up that could say something else (DNS rebinding). One
//! address that is not allowed spoils the name, whichever of them is meant.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use super::{Guard, Refused};

/// Addresses that are still being looked up.
pub type LookingUp = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;

/// A source of the addresses of names.
pub trait Names: Send + Sync {
    /// The addresses of a name. Waits as long as it takes; the caller has the deadline.
    fn look_up(&self, name: &str) -> LookingUp;
}

/// The operating system's knowledge of names: its hosts file and its DNS servers.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemNames;

impl Names for SystemNames {
    fn look_up(&self, name: &str) -> LookingUp {
        let name = name.to_owned();
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }
}

/// Names behind the guard, as the client asks for them.
pub(crate) struct GuardedNames {
    pub(crate) guard: Guard,
    pub(crate) names: Arc<dyn Names>,
}

impl Resolve for GuardedNames {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.guard;
        let looking_up = self.names.look_up(name.as_str());
        Box::pin(async move {
            let found = looking_up.await?;
            if found.is_empty() {
                return Err(Refused::NoAddress(name.as_str().to_owned()).into());
            }
            for address in &found {
                guard.check(Some(name.as_str()), *address)?;
            }
            // Port 0 stands for the URL's.
            let addresses: Addrs = Box::new(found.into_iter().map(|address| SocketAddr::new(address, 0)));
            Ok(addresses)
        })
    }
}
