//! How big a test is: small where everything is run, as big as somebody asks for where one thing is looked at.

/// The number that an environment variable gives, or the usual one.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the size of a test is no configuration of the gateway")]
pub fn size(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |given| given.parse().unwrap())
}

/// The program under test: the one that was built with the tests, or another build of it that `ONCEHOOK_TEST_BINARY` names.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "which build is tested is no configuration of the gateway")]
pub fn binary(built: &str) -> String {
    std::env::var("ONCEHOOK_TEST_BINARY").unwrap_or_else(|_| built.to_owned())
}
