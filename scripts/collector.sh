#!/bin/sh
# Builds the OpenTelemetry Collector of scripts/collector.yaml, once, and prints the program's path.
#
#   scripts/collector.sh           the path; builds it first where it is missing, which needs Go
#   scripts/collector.sh --there   the path, or exit code 1 where it was not built yet
#
# It is kept in a cache outside of the repository, in a folder for each version of collector.yaml.
set -eu

BUILDER=go.opentelemetry.io/collector/cmd/builder@v0.155.0
LIMIT_S=900

say() {
	echo "$*" >&2
}

manifest=$(dirname "$0")/collector.yaml
version=$(cksum <"$manifest" | tr -d ' ')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/batchmill/collector
program=$cache/$version/otelcol

if [ -x "$program" ]; then
	echo "$program"
	exit
fi
[ "${1:-}" != --there ] || exit 1
if ! command -v go >/dev/null; then
	say "The OpenTelemetry Collector is not in $cache/$version, and Go is not here to build it."
	say "  Debian, Ubuntu:  sudo apt-get install golang   (1.25 or newer; else from https://go.dev/dl)"
	say "  Fedora:          sudo dnf install golang"
	say "  macOS:           brew install go"
	exit 1
fi

mkdir -p "$cache"
folder=$(mktemp -d "$cache/.fresh-XXXXXX")
trap 'rm -rf "$folder"' EXIT
say "==> building the OpenTelemetry Collector, once; this takes minutes"
cp "$manifest" "$folder/collector.yaml"
if ! (cd "$folder" && timeout "$LIMIT_S" go run "$BUILDER" --config collector.yaml >log 2>&1); then
	tail -n 5 "$folder/log" >&2
	say "The OpenTelemetry Collector could not be built: can this machine reach Go's module proxy?"
	exit 1
fi
mkdir -p "$cache/$version"
mv -f "$folder/build/otelcol" "$program" # whole at once: another process may be doing the same
echo "$program"
