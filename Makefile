# Every task of the project. `make help` lists them; CI runs `make test` and nothing else.

CARGO ?= cargo
# For the receiver in examples/, if the machine has no Node with node:sqlite (22.13 or newer).
NODE_VERSION := 24.21.0

.PHONY: help run check test test-mysql mysql conformance bench bench-rows bench-growth floods layers prove services

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

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
	./conformance/run

test-mysql: services mysql ## What runs on MariaDB in `make test`, on Oracle's MySQL (about 10 minutes)
	ONCEHOOK_TEST_MYSQL="$(CURDIR)/target/tools/mysql" $(CARGO) test -p oncehook --test it -- mysql mariadb sql_routes::r

conformance: ## Official libraries from PyPI and npm against oncehook, both ways, and a validator for the OpenAPI document
	./conformance/run

bench: services ## Every journal beside its ceiling and beside the stack people build today (20 to 30 minutes); bench/REPORT.md
	$(CARGO) build --release -p oncehook-server -p oncehook-testkit
	@python3 -m venv --help >/dev/null || { apt-get update -qq && apt-get install -y -qq python3-venv; }
	./target/release/compare

bench-rows: services ## In detail: keys, full ledger, memory, effects, history, order within entities (about 15 minutes)
	$(CARGO) build --release -p oncehook-server -p oncehook-testkit
	./target/release/bench
	./target/release/effects
	./target/release/order

bench-growth: services ## A history that grows to ten million events, on SQLite, PostgreSQL and MariaDB (more than an hour); bench/GROWTH.md
	$(CARGO) build --release -p oncehook-server --bin oncehook -p oncehook-testkit --bin effects
	./target/release/effects growth
	./target/release/effects growth --journal postgres
	./target/release/effects growth --journal mysql

floods: ## Strangers without a secret hold memory and connections for a minute each while a genuine client sends (about 8 minutes)
	$(CARGO) build --release -p oncehook-server --bin oncehook
	$(CARGO) build --release -p oncehook-testkit --bin floods
	./target/release/floods
	$(CARGO) test -p oncehook-server --lib -- --ignored --nocapture fault_72_a_minute_of_forged_keys

layers: services ## Copies over four nodes with Redis in trouble, and a database that is away for a minute (about 5 minutes)
	$(CARGO) build --release -p oncehook-server --bin oncehook
	$(CARGO) build --release -p oncehook-testkit --bin layers
	./target/release/layers copies
	./target/release/layers outage

prove: services ## Kills, power cuts, failing disks, frozen nodes, planted mistakes: the proof, and docs/PROOF.md (under 30 minutes)
	$(CARGO) build --release -p oncehook-server --bin oncehook
	$(CARGO) build -p oncehook-testkit -p oncehook-server --features oncehook-testkit/planted --bins
	./target/debug/prove target/release/oncehook target/debug/oncehook $(if $(ONLY),--only '$(ONLY)',--write docs/PROOF.md) $(if $(SEED),--seed $(SEED))

mysql: ## Fetch Oracle's MySQL into target/tools/mysql; nothing is installed into the system
	./tools/mysql.sh

# What the tests need beside Rust and a C compiler. Missing parts are installed (Debian, root), never skipped.
services:
	@command -v strace >/dev/null || { apt-get update -qq && apt-get install -y -qq strace; }
	@ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq postgresql; }
	@[ -x /usr/sbin/mariadbd ] && [ -x /usr/bin/mariadb ] || { apt-get update -qq && apt-get install -y -qq mariadb-server-core mariadb-client-core; }
	@[ -x /usr/sbin/pgbouncer ] || { apt-get update -qq && apt-get install -y -qq pgbouncer; }
	@command -v redis-server >/dev/null || { apt-get update -qq && apt-get install -y -qq redis-server; }
	@command -v mount >/dev/null || { apt-get update -qq && apt-get install -y -qq mount; }
	@python3 -c 'import sqlite3' 2>/dev/null || { apt-get update -qq && apt-get install -y -qq python3; }
	@for node in node target/tools/node_modules/*/bin/node; do $$node -e 'require("node:sqlite")' 2>/dev/null && exit; done; \
	  command -v npm >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends npm; }; \
	  npm install --silent --no-save --ignore-scripts --prefix target/tools \
	    node-linux-$$(uname -m | sed 's/x86_64/x64/; s/aarch64/arm64/')@$(NODE_VERSION)
