//! What a person would forget: the documents name tests that exist, metrics are named in one place, and the tree holds no
//! traces of the machine it was made on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use oncehook_testkit::prove::{cluster, elsewhere, embedded, spooling};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every file below a directory with one of the endings.
fn files(directory: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                files(&path, endings, found);
            }
        } else if endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
}

fn sources() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    files(&root().join("crates"), &[".rs"], &mut found);
    found.into_iter().map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn every_test_that_the_documents_name_exists() {
    let code: BTreeSet<String> = sources()
        .iter()
        .flat_map(|(_, text)| text.lines())
        .filter_map(|line| line.split("fn ").nth(1))
        .filter_map(|rest| rest.split(['(', '<']).next())
        .map(str::to_owned)
        .collect();
    let document = std::fs::read_to_string(root().join("docs/REQUIREMENTS.md")).unwrap();
    let named: Vec<&str> = document
        .lines()
        .filter(|line| line.starts_with("| R"))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .filter(|name| !name.contains(' '))
        .collect();
    assert!(named.len() > 30, "the table was not read");
    let missing: Vec<&&str> = named.iter().filter(|name| !code.contains(**name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn every_requirement_is_in_the_table() {
    let document = std::fs::read_to_string(root().join("docs/REQUIREMENTS.md")).unwrap();
    let mut listed = BTreeSet::new();
    for line in document.lines().filter(|line| line.starts_with("| R")) {
        let ids = line.split('|').nth(1).unwrap().trim();
        let numbers: Vec<u32> = ids.split('–').map(|id| id.trim_start_matches('R').parse().unwrap()).collect();
        listed.extend(*numbers.first().unwrap()..=*numbers.last().unwrap());
    }
    assert_eq!(listed, (1..=48).collect());
}

#[test]
fn metrics_are_named_in_one_place() {
    for (path, text) in sources() {
        let product = path.components().any(|part| part.as_os_str() == "src");
        if product && !path.ends_with("oncehook/src/observe.rs") {
            assert!(!text.contains("registry.register"), "{}", path.display());
        }
    }
}

#[test]
fn every_module_says_what_it_is_for() {
    for (path, text) in sources() {
        assert!(text.starts_with("//!"), "{} does not open with //!", path.display());
    }
}

/// What cargo would build for this package: the features of every package in its tree.
fn tree(package: &str, edges: &str) -> String {
    let output = std::process::Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--package", package, "--edges", edges])
        .args(["--prefix", "none", "--format", "{p} has {f}"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn only_tests_can_end_the_process_where_they_like() {
    check_only_tests_have("crash-points");
}

#[test]
fn r47_only_tests_and_the_proof_can_make_mistakes_on_purpose() {
    check_only_tests_have("planted");
}

/// The program's own tests have a feature; no build that could be released has it.
fn check_only_tests_have(feature: &str) {
    let tested = tree("oncehook-server", "normal,build,dev");
    assert!(tested.contains(feature), "the tests of the program ask for it");
    for package in ["oncehook-server", "oncehook-testkit"] {
        let built = tree(package, "normal,build");
        assert!(built.contains("oncehook v"), "{built}");
        assert!(!built.contains(feature), "a build of {package} has {feature}:\n{built}");
    }
}

/// The names of all crash points.
fn crash_points() -> BTreeSet<String> {
    let mut points = BTreeSet::new();
    for (path, text) in sources() {
        if path.components().any(|part| part.as_os_str() == "src") {
            for call in text.split("crash::point(").skip(1) {
                let call = call.split(");").next().unwrap();
                points.extend(call.split('"').skip(1).step_by(2).map(str::to_owned));
            }
        }
    }
    assert!(points.len() >= 7, "{points:?}");
    points
}

#[test]
fn every_crash_point_is_visited_by_a_test() {
    let visited = root().join("crates/oncehook-server/tests/it/crash_points.rs");
    let visited = std::fs::read_to_string(visited).unwrap();
    for point in crash_points() {
        assert!(visited.contains(&format!("kill_at(\"{point}\"")), "nothing is killed at {point}");
    }
}

#[test]
fn r47_the_proof_kills_at_every_crash_point() {
    let visited: BTreeSet<String> =
        [&embedded::POINTS[..], &cluster::POINTS, &cluster::DAY_POINTS, &spooling::POINTS, &elsewhere::POINTS]
            .into_iter()
            .flatten()
            .map(|(point, _)| (*point).to_owned())
            .collect();
    assert_eq!(crash_points(), visited);
}
