//! The command line's door for randomness.

use anyhow::anyhow;

/// `N` random bytes in hexadecimal.
pub(super) fn hex<const N: usize>() -> anyhow::Result<String> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| anyhow!("the system gives no random bytes"))?;
    Ok(hex::encode(bytes))
}
