#!/bin/bash
# Starts a real systemd as PID 1 in namespaces of its own: boot.sh WORK_FOLDER v2|v1 KEPT… Root and unshare are needed.
# WORK_FOLDER is /run/test inside; it holds `system/` (units). Everything that systemd or a service writes to is a tmpfs
# of its own: without that, systemd's tmpfiles would empty the machine's /tmp, and units would land in its /etc. The
# folders KEPT are there all the same.
# v2: the unified cgroup tree. v1: the memory controller, where the machine has that one on v1 only.
set -eu
exec unshare --fork --pid --mount --uts --ipc --cgroup --kill-child bash -c '
set -eu
work=$1 layout=$2
shift 2
mount --make-rprivate /
mount -t proc proc /proc
kept=$(mktemp -d -p /dev/shm)
mount -t tmpfs tmpfs "$kept"
number=0
for path in "$work" "$@"; do
    mkdir "$kept/$number"
    mount --bind "$path" "$kept/$number"
    number=$((number + 1))
done
for folder in /run /home /root /tmp /var/tmp /var/log /var/lib /var/cache /etc/systemd/system; do
    mount -t tmpfs -o mode=755 tmpfs $folder
done
chmod 1777 /tmp /var/tmp
mkdir -p /run/lock /run/test /run/systemd/system
mount --bind "$kept/0" /run/test
number=1
for path in "$@"; do
    if [ ! -e "$path" ]; then
        mkdir -p "$path"
        mount --bind "$kept/$number" "$path"
    fi
    number=$((number + 1))
done
umount -R "$kept"
rmdir "$kept"
# What a boot starts by default (sysctl, remounts, tmpfiles, udev) would set up the machine itself.
for folder in /lib/systemd/system/*.wants /lib/systemd/system-generators; do mount -t tmpfs tmpfs "$folder"; done
cp -r /run/test/system/. /run/systemd/system/
umount -R /sys/fs/cgroup 2>/dev/null || true
if [ "$layout" = v2 ]; then
    mount -t cgroup2 none /sys/fs/cgroup
else
    mount -t tmpfs tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/memory
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    mount -t cgroup -o memory cgroup /sys/fs/cgroup/memory
fi
# As it is on a machine, and not in a container: systemd mounts credentials where PID 1 and the service see them.
mount --make-rshared /
export container=test
exec /lib/systemd/systemd --system --unit=test.target --log-target=null
' boot "$@"
