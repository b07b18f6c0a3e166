# Creates the database at the first start, for the owner in POSTGRES_USER and POSTGRES_PASSWORD, and runs Postgres as
# the user postgres. Passwords are required over TCP and not on the socket, as in the official image.
set -eu
umask 077
if [ "$(id -u)" = 0 ]; then
    chown postgres /var/lib/postgresql
    exec setpriv --reuid postgres --regid postgres --clear-groups sh "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    password=$(mktemp)
    printf %s "$POSTGRES_PASSWORD" >"$password"
    initdb --pgdata "$PGDATA" --username "$POSTGRES_USER" --pwfile "$password" --encoding UTF8 --locale C.UTF-8 \
        --auth-local trust --auth-host scram-sha-256
    rm "$password"
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    echo "CREATE DATABASE \"$POSTGRES_DB\"" | postgres --single -D "$PGDATA" postgres
fi
exec "$@" -c listen_addresses='*'
