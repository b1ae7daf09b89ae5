#!/bin/sh
# Installs servers that some tests need and that only system packages provide.
# As root on Debian: installs what is missing, without starting it. Otherwise: prints what to install.
# Never fails: a test whose server is missing is skipped (or fails under CI=true).
set -u
PATH=$PATH:/usr/sbin:/sbin

# Each package has a program of the same name.
missing=
for package in curl nginx haproxy openssl prometheus chromium-headless-shell redis-server nodejs npm; do
    command -v "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "== not installed, so tests that need them cannot run:$missing (on Debian: sudo apt-get install$missing)"
    exit 0
fi

# Debian starts a server when it installs it. policy-rc.d prevents that; an existing one is kept.
policy=/usr/sbin/policy-rc.d
if ! [ -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

echo "== installing for tests:$missing (apt-get; once for each machine)"
log=$(mktemp)
# shellcheck disable=SC2086  # a list of words
if apt-get update -qq >"$log" 2>&1 &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >>"$log" 2>&1; then
    # With systemd, installing also enables the servers: undo that, or the next boot starts them.
    if [ -d /run/systemd/system ]; then
        for package in $missing; do systemctl disable --now "$package" >>"$log" 2>&1; done
    fi
else
    echo "== apt-get could not install$missing; tests that need them cannot run. Its output:"
    tail -n 5 "$log"
fi
rm -f "$log"
