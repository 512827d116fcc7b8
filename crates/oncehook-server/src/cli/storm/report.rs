//! The verdict on each hazard, for people, programs and CI.
//!
//! Promises: an event that no sender was told about cannot be lost, only refused; a run in which nothing was judged is not a
//! success.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use super::super::text;
use super::attempt::Ending;
use super::hazard::Hazard;
use super::script::Heard;

/// Ids that are named in a report.
const NAMED: usize = 3;

/// What came of one hazard.
pub(super) struct Finding {
    pub(super) hazard: Hazard,
    pub(super) verdict: Verdict,
    pub(super) events: usize,
    pub(super) effects: i64,
    pub(super) heard: Tally,
    pub(super) took: Duration,
}

/// How it went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Each event took effect once.
    Held,
    /// Some did not.
    Broken(Broken),
    /// Nobody was told that any of these events arrived.
    Refused,
    /// It makes no sense here.
    Skipped(String),
}

/// What went wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Broken {
    /// Effects beyond the first of each event.
    pub(super) extra: i64,
    /// Events that were acknowledged and had no effect.
    pub(super) lost: i64,
    /// Some of the events, where it is known which.
    pub(super) named: Vec<String>,
}

/// What the senders heard.
#[derive(Default)]
pub(super) struct Tally {
    statuses: BTreeMap<u16, u64>,
    cut: u64,
    failed: u64,
    first_failure: Option<String>,
}

impl Tally {
    pub(super) fn of(heard: &[Heard]) -> Self {
        let mut tally = Self::default();
        for ending in heard.iter().flat_map(|heard| &heard.endings) {
            match ending {
                Ending::Answered(status) => *tally.statuses.entry(*status).or_default() += 1,
                Ending::Cut => tally.cut += 1,
                Ending::Failed(cause) => {
                    tally.failed += 1;
                    tally.first_failure.get_or_insert_with(|| cause.clone());
                }
            }
        }
        tally
    }

    fn attempts(&self) -> u64 {
        self.statuses.values().sum::<u64>() + self.cut + self.failed
    }

    /// `90 × 200, 10 × cut`.
    pub(super) fn words(&self) -> String {
        let mut words: Vec<String> =
            self.statuses.iter().map(|(status, count)| format!("{count} × {status}")).collect();
        if self.cut > 0 {
            words.push(format!("{} × cut off", self.cut));
        }
        if let Some(cause) = &self.first_failure {
            words.push(format!("{} × no answer ({cause})", self.failed));
        }
        words.join(", ")
    }
}

/// Effects of each event, where that can be asked: `counts` has one entry per event.
pub(super) fn judge_each(heard: &[Heard], counts: &[i64]) -> Verdict {
    if !heard.iter().any(Heard::is_acknowledged) {
        return Verdict::Refused;
    }
    let mut broken = Broken::default();
    for (heard, count) in heard.iter().zip(counts) {
        let lost = *count == 0 && heard.is_acknowledged();
        broken.extra += (count - 1).max(0);
        broken.lost += i64::from(lost);
        if (lost || *count > 1) && broken.named.len() < NAMED {
            broken.named.push(heard.key.clone());
        }
    }
    if broken.extra + broken.lost == 0 { Verdict::Held } else { Verdict::Broken(broken) }
}

/// Effects of all events together.
pub(super) fn judge_sum(heard: &[Heard], effects: i64) -> Verdict {
    let acknowledged = heard.iter().filter(|heard| heard.is_acknowledged()).count() as i64;
    if acknowledged == 0 {
        return Verdict::Refused;
    }
    // One that was never acknowledged may have taken effect all the same.
    let extra = (effects - heard.len() as i64).max(0);
    let lost = (acknowledged - effects).max(0);
    if extra + lost == 0 { Verdict::Held } else { Verdict::Broken(Broken { extra, lost, named: Vec::new() }) }
}

impl Finding {
    /// Whether it speaks against the endpoint.
    pub(super) fn is_bad(&self) -> bool {
        matches!(self.verdict, Verdict::Broken(_) | Verdict::Refused)
    }

    fn word(&self) -> &'static str {
        match &self.verdict {
            Verdict::Held => "held",
            Verdict::Broken(broken) if broken.extra > 0 && broken.lost > 0 => "DOUBLED AND LOST",
            Verdict::Broken(broken) if broken.extra > 0 => "DOUBLED",
            Verdict::Broken(_) => "LOST",
            Verdict::Refused => "REFUSED",
            Verdict::Skipped(_) => "skipped",
        }
    }

    /// What is wrong and where to look; nothing if all is well.
    fn advice(&self) -> Option<String> {
        match &self.verdict {
            Verdict::Held => {
                let unheard = self.hazard == Hazard::Slow && self.heard.cut == 0;
                unheard.then(|| "every answer came in time, so nothing was sent twice".to_owned())
            }
            Verdict::Skipped(why) => Some(why.clone()),
            Verdict::Refused => Some(format!("no event was acknowledged: {}", self.heard.words())),
            Verdict::Broken(broken) => {
                let mut parts = Vec::new();
                if broken.extra > 0 {
                    parts.push(format!("{} effects too many: {}", broken.extra, self.hazard.why_doubled()));
                }
                if broken.lost > 0 {
                    parts.push(format!("{} acknowledged and without effect: {}", broken.lost, self.hazard.why_lost()));
                }
                if !broken.named.is_empty() {
                    parts.push(format!("such as {}", broken.named.join(", ")));
                }
                Some(parts.join("; "))
            }
        }
    }
}

/// The table and the advice.
pub(super) fn lines(findings: &[Finding]) -> String {
    let rows = findings.iter().map(|finding| {
        vec![
            finding.hazard.title().to_owned(),
            finding.word().to_owned(),
            finding.events.to_string(),
            finding.effects.to_string(),
            finding.heard.words(),
        ]
    });
    let mut lines = vec![text::table(&["hazard", "verdict", "events", "effects", "answers"], rows)];
    for finding in findings {
        if let Some(advice) = finding.advice() {
            lines.push(format!("\n{}: {advice}", finding.hazard.title()));
        }
    }
    let bad: Vec<&str> =
        findings.iter().filter(|finding| finding.is_bad()).map(|finding| finding.hazard.title()).collect();
    lines.push(match bad.as_slice() {
        [] => "\nEvery event took effect once.".to_owned(),
        bad => format!("\nThis endpoint does not stand: {}.", bad.join(", ")),
    });
    lines.join("\n")
}

/// The one object of `--json`.
pub(super) fn json(findings: &[Finding], url: &str, exact: bool) -> serde_json::Value {
    let hazards: Vec<_> = findings
        .iter()
        .map(|finding| {
            let (extra, lost, named) = match &finding.verdict {
                Verdict::Broken(broken) => (broken.extra, broken.lost, broken.named.clone()),
                _ => (0, 0, Vec::new()),
            };
            json!({
                "hazard": finding.hazard.name(),
                "verdict": finding.word().to_lowercase(),
                "ok": !finding.is_bad(),
                "events": finding.events,
                "attempts": finding.heard.attempts(),
                "effects": finding.effects,
                "extra": extra,
                "lost": lost,
                "such_as": named,
                "cut_off": finding.heard.cut,
                "statuses": finding.heard.statuses.iter().map(|(status, count)| (status.to_string(), *count)).collect::<BTreeMap<_, _>>(),
                "advice": finding.advice(),
                "seconds": finding.took.as_secs_f64(),
            })
        })
        .collect();
    json!({ "url": url, "counted": if exact { "each event" } else { "sum" }, "ok": findings.iter().all(|f| !f.is_bad()), "hazards": hazards })
}

/// A JUnit file: one test case per hazard.
pub(super) fn junit(findings: &[Finding]) -> String {
    let failures = findings.iter().filter(|finding| finding.is_bad()).count();
    let skipped = findings.iter().filter(|finding| matches!(finding.verdict, Verdict::Skipped(_))).count();
    let time: f64 = findings.iter().map(|finding| finding.took.as_secs_f64()).sum();
    let mut xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n<testsuite name=\"oncehook storm\" tests=\"{}\" failures=\"{failures}\" skipped=\"{skipped}\" time=\"{time:.3}\">\n",
        findings.len()
    );
    for finding in findings {
        let advice = finding.advice().unwrap_or_default();
        let inside = match &finding.verdict {
            Verdict::Held => String::new(),
            Verdict::Skipped(_) => format!("<skipped message=\"{}\"/>", escape(&advice)),
            Verdict::Broken(_) | Verdict::Refused => {
                format!("<failure type=\"{}\" message=\"{}\"/>", escape(finding.word()), escape(&advice))
            }
        };
        xml.push_str(&format!(
            "<testcase classname=\"oncehook.storm\" name=\"{}\" time=\"{:.3}\">{inside}</testcase>\n",
            finding.hazard.name(),
            finding.took.as_secs_f64()
        ));
    }
    xml.push_str("</testsuite>\n</testsuites>\n");
    xml
}

/// Text inside an attribute. Control characters cannot stand in XML at all.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            char if char.is_control() => escaped.push('?'),
            char => escaped.push(char),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(key: &str, statuses: &[u16]) -> Heard {
        Heard { key: key.to_owned(), endings: statuses.iter().map(|status| Ending::Answered(*status)).collect() }
    }

    #[test]
    fn each_event_is_judged_by_itself() {
        let all = [heard("a", &[200, 200]), heard("b", &[503, 200]), heard("c", &[503])];
        assert_eq!(judge_each(&all, &[1, 1, 0]), Verdict::Held, "c was never acknowledged");
        assert_eq!(judge_each(&all, &[1, 1, 1]), Verdict::Held, "and may have taken effect all the same");
        let broken = |extra, lost, named: &[&str]| {
            Verdict::Broken(Broken { extra, lost, named: named.iter().map(|&name| name.to_owned()).collect() })
        };
        assert_eq!(judge_each(&all, &[3, 0, 0]), broken(2, 1, &["a", "b"]), "one does not make up for the other");
        assert_eq!(judge_each(&[heard("a", &[401])], &[0]), Verdict::Refused);
    }

    #[test]
    fn a_sum_can_only_say_how_many() {
        let all = [heard("a", &[200]), heard("b", &[200]), heard("c", &[503])];
        let broken = |extra, lost| Verdict::Broken(Broken { extra, lost, named: Vec::new() });
        assert_eq!(judge_sum(&all, 2), Verdict::Held);
        assert_eq!(judge_sum(&all, 3), Verdict::Held);
        assert_eq!(judge_sum(&all, 4), broken(1, 0));
        assert_eq!(judge_sum(&all, 1), broken(0, 1));
        assert_eq!(judge_sum(&[heard("a", &[500])], 0), Verdict::Refused);
    }

    #[test]
    fn junit_is_well_formed_whatever_it_is_told() {
        let finding = Finding {
            hazard: Hazard::Race,
            verdict: Verdict::Skipped("\"<&>\u{1b}".to_owned()),
            events: 1,
            effects: 1,
            heard: Tally::default(),
            took: Duration::from_millis(1),
        };
        let xml = junit(&[finding]);
        assert!(xml.contains("<skipped message=\"&quot;&lt;&amp;&gt;?\"/>"), "{xml}");
        assert!(xml.contains("tests=\"1\" failures=\"0\" skipped=\"1\""), "{xml}");
    }
}
