# Every task of the project. `make help` lists them; CI runs `make test` and nothing else.

CARGO ?= cargo

.PHONY: help run check test bench services

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

run: ## Build the gateway and run it in ./demo on SQLite with a sample source
	$(CARGO) build --release --bin oncehook
	@mkdir -p demo && cd demo && { [ -f oncehook.toml ] || ../target/release/oncehook init; } && exec ../target/release/oncehook serve

check: ## Format, lints, documentation, dependency rules
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny check bans licenses sources

test: services ## Everything that must hold: lints, units, suites, vectors, crashes, hostile input
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) test --workspace

bench: ## How much of the ceiling durable accepts reach, in one run (about 5 minutes)
	$(CARGO) build --release -p oncehook-server -p oncehook-testkit
	./target/release/bench

# What the tests need beside Rust and a C compiler. Missing parts are installed (Debian, root), never skipped.
services:
	@command -v strace >/dev/null || { apt-get update -qq && apt-get install -y -qq strace; }
	@ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq postgresql; }
	@command -v mount >/dev/null || { apt-get update -qq && apt-get install -y -qq mount; }
