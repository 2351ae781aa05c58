#!/bin/sh
# Makes sure that a Java runtime is there: installs one on Debian or Ubuntu where we may, else says what to do.
set -eu
command -v java >/dev/null 2>&1 && exit 0
[ -n "${JAVA_HOME:-}" ] && [ -x "$JAVA_HOME/bin/java" ] && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
	apt-get update -qq
	apt-get install -y -qq openjdk-17-jre-headless
	exit 0
fi
echo "Java is missing: install a Java 17 or 21 runtime (on Debian or Ubuntu: sudo apt-get install openjdk-17-jre-headless) and run this again" >&2
exit 1
