#!/usr/bin/env bash
# Run a command where little is as usual: no IPv6, /proc/sys read-only, no home, LANG=C, more OpenMP threads than cores,
# both cores busy. Needs root: `bash tools/elsewhere.sh make test`.
set -euo pipefail
if [ "${1:-}" != --inside ]; then
	exec unshare --mount --net bash "$0" --inside "$@"
fi
shift
ip link set lo up
sysctl --quiet -w net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.lo.disable_ipv6=1
mount --bind /proc/sys /proc/sys
mount -o remount,ro,bind /proc/sys
busy=()
for _ in $(seq "$(nproc)"); do
	while :; do :; done &
	busy+=($!)
done
trap 'kill "${busy[@]}"' EXIT
env -u HOME LANG=C LC_ALL=C OMP_NUM_THREADS=8 "$@"
