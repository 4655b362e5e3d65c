#!/bin/sh
# Finds a program that pip cannot install, or installs it; prints its folder.
#
#   scripts/system-packages.sh java       a folder whose bin/java is Java 17 or newer
#   scripts/system-packages.sh compiler   a folder with a C compiler, bin/cc
#   scripts/system-packages.sh postgres   a folder with PostgreSQL's bin/initdb
#   scripts/system-packages.sh prometheus a folder with Prometheus' bin/prometheus
#   scripts/system-packages.sh alertmanager a folder with Debian's bin/prometheus-alertmanager
#   scripts/system-packages.sh maven      a folder with Maven's bin/mvn
#   scripts/system-packages.sh chromium   a folder with the browser bin/chromium
#
# A program that is found is not changed. A missing one is installed only as root with apt-get, without asking.
# Otherwise the script prints to standard error what to install, and exits with 1.
set -eu

OLDEST_JAVA=17

say() {
	echo "$*" >&2
}

# java_is_new_enough HOME: "1.8.0_392" is Java 8; its major version reads as 1, which is too old as well.
java_is_new_enough() {
	[ -x "$1/bin/java" ] || return 1
	major=$("$1/bin/java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1)
	[ "${major:-0}" -ge "$OLDEST_JAVA" ]
}

# On macOS /usr/bin/java is a stub; java_home prints the folder of an installed Java.
java_on_path() {
	[ ! -x /usr/libexec/java_home ] || /usr/libexec/java_home -v "$OLDEST_JAVA+" 2>/dev/null || true
	program=$(command -v java) || return 0
	program=$(readlink -f "$program" 2>/dev/null) || return 0
	dirname "$(dirname "$program")"
}

find_java() {
	for home in "${JAVA_HOME:-}" "$(java_on_path)" /usr/lib/jvm/* /opt/java/*; do
		if [ -n "$home" ] && java_is_new_enough "$home"; then
			echo "$home"
			return 0
		fi
	done
	return 1
}

find_compiler() {
	program=$(command -v cc) || return 1
	echo '#include <stdlib.h>' | "$program" -E - >/dev/null 2>&1 || return 1 # without the C library's headers
	dirname "$(dirname "$program")"
}

find_postgres() {
	if program=$(command -v initdb); then
		program=$(readlink -f "$program" 2>/dev/null || echo "$program")
		dirname "$(dirname "$program")"
		return 0
	fi
	# sort -V puts 9.6 before 15, so the newest version is last.
	newest=$(find /usr/lib/postgresql/*/bin/initdb /usr/pgsql-*/bin/initdb 2>/dev/null | sort -V | tail -n 1)
	[ -n "$newest" ] || return 1
	dirname "$(dirname "$newest")"
}

find_prometheus() {
	program=$(command -v prometheus) || return 1
	[ "$(basename "$(dirname "$program")")" = bin ] || return 1
	dirname "$(dirname "$program")"
}

find_alertmanager() {
	program=$(command -v prometheus-alertmanager) || return 1
	[ "$(basename "$(dirname "$program")")" = bin ] || return 1
	dirname "$(dirname "$program")"
}

find_maven() {
	program=$(command -v mvn) || return 1
	program=$(readlink -f "$program" 2>/dev/null || echo "$program")
	dirname "$(dirname "$program")"
}

find_chromium() {
	program=$(command -v chromium) || return 1
	[ "$(basename "$(dirname "$program")")" = bin ] || return 1
	dirname "$(dirname "$program")"
}

# install REASON PACKAGE...: installs the first of the packages that this Debian or Ubuntu offers.
install() {
	why=$1
	shift
	[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
	log=$(mktemp)
	export DEBIAN_FRONTEND=noninteractive
	apt-get update >"$log" 2>&1 || say "apt-get update failed; using the existing package lists"
	for package in "$@"; do
		if apt-cache show "$package" >/dev/null 2>&1; then
			say "==> installing $package with apt-get: $why"
			if apt-get install -y --no-install-recommends "$package" >>"$log" 2>&1; then
				rm -f "$log"
				return 0
			fi
		fi
	done
	tail -n 20 "$log" >&2
	rm -f "$log"
	return 1
}

case "${1:-}" in
java)
	find_java && exit
	install "Spark needs Java $OLDEST_JAVA or newer" \
		openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless && find_java && exit
	say "Spark needs Java $OLDEST_JAVA or newer: not found in JAVA_HOME or on the PATH."
	say "  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless   (or default-jre-headless)"
	say "  Fedora:          sudo dnf install java-21-openjdk-headless"
	say "  macOS:           brew install openjdk@17, then set JAVA_HOME as brew prints"
	;;
compiler)
	find_compiler && exit
	install "the OTLP decoder is compiled from C" build-essential && find_compiler && exit
	say "A C compiler, cc, was not found on the PATH."
	say "  Debian, Ubuntu:  sudo apt-get install build-essential"
	say "  Fedora:          sudo dnf install gcc"
	say "  macOS:           xcode-select --install"
	;;
postgres)
	find_postgres && exit
	install "the tests of the PostgreSQL store start a server" postgresql && find_postgres && exit
	say "PostgreSQL's initdb was not found on the PATH or in /usr/lib/postgresql."
	say "  Debian, Ubuntu:  sudo apt-get install postgresql"
	say "  Fedora:          sudo dnf install postgresql-server"
	say "  macOS:           brew install postgresql@17"
	;;
prometheus)
	find_prometheus && exit
	install "the tests of the Prometheus exporters start a server" prometheus &&
		find_prometheus && exit
	say "Prometheus was not found in a bin folder on the PATH."
	say "  Debian, Ubuntu:  sudo apt-get install --no-install-recommends prometheus"
	say "  Fedora:          sudo dnf install golang-github-prometheus"
	say "  macOS:           brew install prometheus"
	;;
alertmanager)
	find_alertmanager && exit
	install "the tests of alerts start an Alertmanager" prometheus-alertmanager &&
		find_alertmanager && exit
	say "Alertmanager was not found as prometheus-alertmanager in a bin folder on the PATH."
	say "  Debian, Ubuntu:  sudo apt-get install --no-install-recommends prometheus-alertmanager"
	say "  others:          its release has one program, alertmanager: link it as prometheus-alertmanager"
	;;
maven)
	find_maven && exit
	install "the tests with a Kafka broker download its jars with Maven" maven && find_maven && exit
	say "Maven's mvn was not found on the PATH."
	say "  Debian, Ubuntu:  sudo apt-get install maven"
	say "  Fedora:          sudo dnf install maven"
	say "  macOS:           brew install maven"
	;;
chromium)
	find_chromium && exit
	install "the tests of the web UI start a browser" chromium && find_chromium && exit
	say "Chromium was not found in a bin folder on the PATH."
	say "  Debian:          sudo apt-get install --no-install-recommends chromium"
	say "  Fedora:          sudo dnf install chromium"
	say "  macOS:           brew install --cask chromium, and link it as chromium in a bin folder on the PATH"
	;;
*)
	say "usage: $0 java|compiler|postgres|prometheus|alertmanager|maven|chromium"
	exit 2
	;;
esac
exit 1
