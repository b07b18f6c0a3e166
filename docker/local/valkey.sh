# Runs Valkey as the user valkey.
set -eu
chown valkey /data
exec setpriv --reuid valkey --regid valkey --clear-groups "$@"
