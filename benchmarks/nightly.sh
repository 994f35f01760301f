#!/usr/bin/env bash
# Measure the commits that have no results yet, keep the results on the branch benchmark-results, build the
# pages under .asv/html. Needs a full clone; `benchmarks/nightly.sh [RANGE [OPTIONS]]`, by default the last
# commit; options are those of `asv run`, such as `--bench Dispatch`.
set -euo pipefail
cd "$(dirname "$0")/.."
range=${1:-HEAD^!}
shift || true
results=.asv/results
mkdir -p .asv
if ! git worktree list --porcelain | grep -q "/$results$"; then
    git fetch --quiet origin benchmark-results:benchmark-results 2>/dev/null || true
    git rev-parse --quiet --verify benchmark-results >/dev/null ||
        git branch benchmark-results "$(git commit-tree -m "No results yet" "$(git mktree </dev/null)")"
    git worktree add --quiet "$results" benchmark-results
fi
nox -s bench -- run --skip-existing-successful "$@" "$range"
git -C "$results" add .
git -C "$results" diff --cached --quiet || git -C "$results" commit --quiet -m "Results of $(git rev-parse --short HEAD)"
nox -s bench -- publish
