//! Whether a request that changes something was made on purpose: a browser that a strange page has sent here says so in
//! its headers.
//!
//! Promises: a request that names another origin than the host it asks, or that a browser marks as coming from elsewhere,
//! is refused. Programs send none of these headers and are not concerned.
//!
//! Does not: say who asks. That is the token's matter.

use http::{HeaderMap, Method, header};

/// What a browser says about where a request comes from.
const SEC_FETCH_SITE: &str = "sec-fetch-site";

/// Whether a method changes nothing.
pub(super) fn is_safe(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Whether a browser was led here by a page that is not ours.
pub(super) fn is_foreign(headers: &HeaderMap) -> bool {
    foreign_site(headers) || foreign_origin(headers)
}

/// `same-site` is not enough: another port of this machine, or a sibling name, is another site.
fn foreign_site(headers: &HeaderMap) -> bool {
    let mut said = headers.get_all(SEC_FETCH_SITE).iter();
    !said.all(|site| matches!(site.as_bytes(), b"same-origin" | b"none"))
}

/// An origin is a scheme and the host that was asked; `null` is nobody we know.
fn foreign_origin(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let ours = |origin: &str| {
        let asked = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        asked.is_some_and(|asked| !host.is_empty() && asked.eq_ignore_ascii_case(host))
    };
    !headers.get_all(header::ORIGIN).iter().all(|origin| origin.to_str().is_ok_and(ours))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn fault_100_strange_pages_are_recognised() {
        for (foreign, headers) in [
            (false, &[][..]),
            (false, &[("origin", "http://127.0.0.1:8081")]),
            (false, &[("origin", "https://127.0.0.1:8081")]),
            (false, &[("sec-fetch-site", "same-origin"), ("origin", "http://127.0.0.1:8081")]),
            (false, &[("sec-fetch-site", "none")]),
            (true, &[("origin", "http://127.0.0.1:3000")]),
            (true, &[("origin", "http://evil.example")]),
            (true, &[("origin", "http://127.0.0.1:8081.evil.example")]),
            (true, &[("origin", "127.0.0.1:8081")]),
            (true, &[("origin", "null")]),
            (true, &[("origin", "")]),
            (true, &[("origin", "http://127.0.0.1:8081"), ("origin", "http://evil.example")]),
            (true, &[("sec-fetch-site", "cross-site")]),
            (true, &[("sec-fetch-site", "same-site")]),
            (true, &[("sec-fetch-site", "cross-site"), ("origin", "http://127.0.0.1:8081")]),
        ] {
            let mut map = HeaderMap::new();
            map.insert(header::HOST, HeaderValue::from_static("127.0.0.1:8081"));
            for (name, value) in headers {
                map.append(*name, HeaderValue::from_static(value));
            }
            assert_eq!(is_foreign(&map), foreign, "{headers:?}");
        }
    }

    #[test]
    fn reading_is_safe() {
        assert!(is_safe(&Method::GET) && is_safe(&Method::HEAD));
        assert!(!is_safe(&Method::POST) && !is_safe(&Method::DELETE) && !is_safe(&Method::PATCH));
    }
}
