# Builds a root for contained commands inside fresh namespaces, enters it and gives up every right.
# bash setup.sh ROOT WORKSPACE SEEN-AS UID PIDS [READ-ONLY SEEN-AS]... -- COMMAND...
set -eu
given=$PATH
PATH=/usr/sbin:/usr/bin:/sbin:/bin
root=$1 workspace=$2 seen=$3 uid=$4 pids=$5
shift 5

mount -t tmpfs -o size=1m,mode=755 tmpfs "$root"
mkdir "$root/dev" "$root/proc" "$root/tmp" "$root/old"

bind() { # what, where, options
  if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$(dirname "$root$2")"; : >> "$root$2"; fi
  mount --bind "$1" "$root$2"
  if [ -n "$3" ]; then mount -o "remount,bind,$3" "$root$2"; fi
}

while [ "$1" != -- ]; do
  if [ -L "$1" ]; then ln -s "$(readlink "$1")" "$root$2"; else bind "$1" "$2" ro,nosuid,nodev; fi
  shift 2
done
shift

for device in null zero full random urandom; do bind "/dev/$device" "/dev/$device" ""; done
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
mkdir "$root/dev/shm"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o size=512m,mode=1777 tmpfs "$root/tmp"
# Where an outer container hides parts of /proc the kernel refuses a new one: then there is none.
if mount -t proc proc "$root/proc" 2>/dev/null; then
  # The namespace's own limit of processes: ulimit does not bind root.
  if [ -n "$pids" ]; then echo "$pids" 2>/dev/null > "$root/proc/sys/kernel/pid_max" || :; fi
  for path in sys sysrq-trigger irq bus; do
    if [ -e "$root/proc/$path" ]; then
      mount --bind "$root/proc/$path" "$root/proc/$path"
      mount -o remount,bind,ro,nosuid,nodev,noexec "$root/proc/$path"
    fi
  done
fi
bind "$workspace" "$seen" ""

ip link set lo up 2>/dev/null || :
hostname testbed 2>/dev/null || :
cd "$root"
pivot_root . old
umount -l /old
rmdir /old
mount -o remount,ro,size=1m,mode=755 /
cd "$seen"
# A second user namespace: mounts of the first are out of its reach. Whoever is not root in it
# loses every capability with the next program; no_new_privs keeps it so.
exec unshare --user --map-user="$uid" --map-group="$uid" -- \
  setpriv --no-new-privs -- env PATH="$given" "$@"
