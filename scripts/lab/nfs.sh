#!/usr/bin/env bash
# The tests over real NFS, where the kernel of this machine has none: in a guest of their own.
#
#   scripts/lab/nfs.sh                              three clients of NFS 4.2 and 3, nodes killed: 10 minutes
#   scripts/lab/nfs.sh tests/test_mounts.py -k ...  other arguments go to pytest
#
# The guest is User Mode Linux, a kernel that runs as a program and needs no virtualisation. It sees the files of this machine and
# writes into its own memory. Needs Debian's user-mode-linux, nfs-kernel-server, kmod and iproute2; with AMX in the processor, gcc.
set -euo pipefail

as_guest() { # the guest's first process: it makes a root that can be written, over the machine's files, and runs the tests there
  local kernel folder
  kernel="$(uname -r)"
  mount -t tmpfs none /mnt
  ln -s "$(command -v kmod)" /mnt/insmod
  /mnt/insmod "/usr/lib/uml/modules/$kernel/kernel/fs/overlayfs/overlay.ko"
  mkdir /mnt/changes /mnt/work /mnt/root
  mount -t overlay -o lowerdir=/,upperdir=/mnt/changes,workdir=/mnt/work none /mnt/root
  cd /mnt/root
  mount -t proc none proc
  mount -t sysfs none sys
  mount -t devtmpfs none dev
  mkdir -p dev/shm lib/modules
  for folder in dev/shm run mnt; do mount -t tmpfs none "$folder"; done
  mkdir mnt/shared
  mount -t hostfs -o "$SHARED" none mnt/shared
  ln -s "/usr/lib/uml/modules/$kernel" lib/modules/
  hostname guest
  chroot . ip link set lo up
  chroot . modprobe --all nfsd nfsv3 nfsv4 veth bridge
  if chroot . bash /mnt/shared/command; then touch mnt/shared/passed; fi
  echo o >proc/sysrq-trigger
  exec tail -f /dev/null # until the kernel has ended
}

# With AMX in the processor the host takes registers at their full length only, and kernels of the 6.1 series give less.
fill_registers() {
  gcc -shared -fPIC -o "$1" -x c - <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <linux/ptrace.h>
#include <string.h>
#include <sys/uio.h>

long ptrace(long request, long pid, long kind, struct iovec *given) {
  static char state[1 << 16];
  struct iovec whole = {state, sizeof state};
  long (*next)(long, long, long, void *) = dlsym(RTLD_NEXT, "ptrace");
  if (request != PTRACE_SETREGSET || kind != NT_X86_XSTATE) return next(request, pid, kind, given);
  next(PTRACE_GETREGSET, pid, kind, &whole);
  memset(state, 0, sizeof state);
  memcpy(state, given->iov_base, given->iov_len);
  return next(request, pid, kind, &whole);
}
C
}

if [ $$ = 1 ]; then as_guest; fi
script="$(readlink -f -- "${BASH_SOURCE[0]}")"
clone="$(dirname -- "$(dirname -- "$(dirname -- "$script")")")"
# shellcheck source=scripts/environment.sh
source "$clone/scripts/environment.sh"
ensure_environment dev
cd -- "$clone"
shared="$(mktemp -d)"
trap 'rm -r -- "$shared"' EXIT
[ $# -gt 0 ] || set -- tests/test_mounts.py -k nfs
# shellcheck disable=SC2154  # $python is set by ensure_environment
{
  export -p
  printf '%q ' cd "$clone"
  printf '\n'
  printf '%q ' "$python" -m pytest -v -s -p no:cacheprovider --timeout 1200 --basetemp /mnt/tests "$@"
} >"$shared/command"
preload=''
if grep -q amx_tile /proc/cpuinfo; then preload="$shared/registers.so" && fill_registers "$preload"; fi
LD_PRELOAD="$preload" linux.uml quiet loglevel=1 mem=3G root=/dev/root rootfstype=hostfs rootflags=/ ro con=null con0=null,fd:1 \
  "PATH=$PATH" "SHARED=$shared" "init=$script" </dev/null
[ -e "$shared/passed" ]
