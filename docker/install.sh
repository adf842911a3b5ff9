#!/bin/sh
# Inside an image that is being built: installs a list of packages, or the project, into /opt/lockstep.
#   install.sh packages-FILE.txt [PACKAGE...]
#   install.sh project
set -eu
[ -x /opt/lockstep/bin/python ] || python3 -m venv /opt/lockstep
pip="/opt/lockstep/bin/python -m pip install --no-cache-dir --no-compile --disable-pip-version-check -q -c /wheels/constraints.txt"
if ls /wheels/*.whl >/dev/null 2>&1; then
  pip="$pip --no-index --find-links /wheels"
fi
cd /wheels
if [ "$1" = project ]; then
  if ls /wheels/lockstep-*.whl >/dev/null 2>&1; then
    $pip --no-deps lockstep
  else
    $pip --no-deps /src
  fi
  # What only an installation needs, and test suites that some packages bring along.
  /opt/lockstep/bin/python -m pip uninstall -q -y setuptools >/dev/null 2>&1 || true
  find /opt/lockstep -type d \( -name __pycache__ -o -name tests -o -name include \) -path '*site-packages*' \
    -prune -exec rm -rf {} +
else
  list=$1
  shift
  $pip -r "$list" "$@"
fi
