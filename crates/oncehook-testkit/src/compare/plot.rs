//! Pictures of figures, as SVG: bars, and lines over a growing size.
//!
//! Does not: scale axes to anything but the data, which always begin at zero.

use std::fmt::Write as _;
use std::path::Path;

use super::load::Load;
use super::report::Report;
use super::throughput::SIZES;

const WIDTH: f64 = 900.0;
const LABEL: f64 = 330.0;
const BAR: f64 = 18.0;
const GAP: f64 = 6.0;

/// Writes the pictures of a comparison; returns their titles and file names.
pub(super) fn save(report: &Report, directory: &Path) -> std::io::Result<Vec<(&'static str, &'static str)>> {
    let of_size = report.accepts.iter().filter(|row| row.size == SIZES[0] && row.load != Load::Ordered);
    let accepts: Vec<(String, f64)> =
        of_size.map(|row| (format!("{}: {}", row.stack.name(), row.load.name()), row.rate)).collect();
    let effects: Vec<(String, f64)> =
        report.effects.iter().map(|row| (row.stack.name().to_owned(), row.drained)).collect();
    let pictures =
        [("Accepts per second, 1 KB", "accepts.svg", accepts), ("Effects per second", "effects.svg", effects)];
    let mut saved = Vec::new();
    for (title, file, of_each) in pictures {
        std::fs::write(directory.join(file), bars(title, &of_each, 0))?;
        saved.push((title, file));
    }
    Ok(saved)
}

fn begin(title: &str, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"13\">\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/><text x=\"10\" y=\"24\" font-size=\"16\">{title}</text>"
    )
}

/// A bar for each name, its figure written out with so many decimals.
pub(super) fn bars(title: &str, bars: &[(String, f64)], decimals: usize) -> String {
    let most = bars.iter().map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let mut svg = begin(title, 50.0 + bars.len() as f64 * (BAR + GAP));
    for (number, (name, value)) in bars.iter().enumerate() {
        let top = 40.0 + number as f64 * (BAR + GAP);
        let length = value / most * (WIDTH - LABEL - 90.0);
        // Writing into a string cannot fail.
        let _ = write!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{name}</text>\
             <rect x=\"{LABEL}\" y=\"{top}\" width=\"{length:.1}\" height=\"{BAR}\" fill=\"#3565a5\"/>\
             <text x=\"{}\" y=\"{}\">{value:.decimals$}</text>",
            LABEL - 8.0,
            top + 14.0,
            LABEL + length + 6.0,
            top + 14.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// A line of a picture.
pub(super) struct Series {
    pub(super) name: String,
    /// From left to right.
    pub(super) points: Vec<(f64, f64)>,
}

const COLOURS: [&str; 6] = ["#3565a5", "#c0392b", "#2e8b57", "#b8860b", "#7d3c98", "#34495e"];
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 620.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 370.0;

/// A line for each series, both axes from zero.
pub(super) fn lines(title: &str, across: &str, series: &[Series]) -> String {
    let points = || series.iter().flat_map(|one| &one.points);
    let far = points().map(|point| point.0).fold(f64::MIN_POSITIVE, f64::max);
    let high = points().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max) * 1.05;
    let place = |(x, y): (f64, f64)| (LEFT + x / far * (RIGHT - LEFT), BOTTOM - y / high * (BOTTOM - TOP));
    let mut svg = begin(title, HEIGHT);
    for part in 0..=4 {
        let (x, y) = (far * f64::from(part) / 4.0, high * f64::from(part) / 4.0);
        let ((left, _), (_, top)) = (place((x, 0.0)), place((0.0, y)));
        // Writing into a string cannot fail.
        let _ = write!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{top:.1}\" y2=\"{top:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <text x=\"{left:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            LEFT - 6.0,
            top + 4.0,
            short(y),
            BOTTOM + 18.0,
            short(x)
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{across}</text>",
        (LEFT + RIGHT) / 2.0,
        BOTTOM + 38.0
    );
    for (number, (one, colour)) in series.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let placed: Vec<(f64, f64)> = one.points.iter().map(|point| place(*point)).collect();
        let path: Vec<String> = placed.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
        for (x, y) in placed {
            let _ = write!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
        let row = TOP + 10.0 + number as f64 * 22.0;
        let _ = write!(
            svg,
            "<rect x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{colour}\"/><text x=\"{}\" y=\"{row}\">{}</text>",
            RIGHT + 16.0,
            row - 11.0,
            RIGHT + 34.0,
            one.name
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// A figure for an axis.
fn short(value: f64) -> String {
    if value >= 10.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}
