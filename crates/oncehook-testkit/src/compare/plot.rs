//! Two pictures of a run, as SVG: bars for accepts and for effects.

use std::fmt::Write as _;
use std::path::Path;

use super::load::Load;
use super::report::Report;
use super::throughput::SIZES;

const WIDTH: f64 = 900.0;
const LABEL: f64 = 330.0;
const BAR: f64 = 18.0;
const GAP: f64 = 6.0;

/// Writes the pictures; returns their titles and file names.
pub(super) fn save(report: &Report, directory: &Path) -> std::io::Result<Vec<(&'static str, &'static str)>> {
    let of_size = report.accepts.iter().filter(|row| row.size == SIZES[0] && row.load != Load::Ordered);
    let accepts: Vec<(String, f64)> =
        of_size.map(|row| (format!("{}: {}", row.stack.name(), row.load.name()), row.rate)).collect();
    let effects: Vec<(String, f64)> =
        report.effects.iter().map(|row| (row.stack.name().to_owned(), row.drained)).collect();
    let pictures = [
        ("Accepts per second, 1 KB", "accepts.svg", accepts),
        ("Effects per second", "effects.svg", effects),
    ];
    let mut saved = Vec::new();
    for (title, file, bars) in pictures {
        std::fs::write(directory.join(file), picture(title, &bars))?;
        saved.push((title, file));
    }
    Ok(saved)
}

fn picture(title: &str, bars: &[(String, f64)]) -> String {
    let most = bars.iter().map(|(_, value)| *value).fold(1.0, f64::max);
    let height = 50.0 + bars.len() as f64 * (BAR + GAP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"13\">\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/><text x=\"10\" y=\"24\" font-size=\"16\">{title}</text>"
    );
    for (number, (name, value)) in bars.iter().enumerate() {
        let top = 40.0 + number as f64 * (BAR + GAP);
        let length = value / most * (WIDTH - LABEL - 90.0);
        // Writing into a string cannot fail.
        let _ = write!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{name}</text>\
             <rect x=\"{LABEL}\" y=\"{top}\" width=\"{length:.1}\" height=\"{BAR}\" fill=\"#3565a5\"/>\
             <text x=\"{}\" y=\"{}\">{value:.0}</text>",
            LABEL - 8.0,
            top + 14.0,
            LABEL + length + 6.0,
            top + 14.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}
