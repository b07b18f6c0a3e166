# Runs Valkey as its own user.
set -eu
chown valkey /data
exec setpriv --reuid valkey --regid valkey --clear-groups "$@"
