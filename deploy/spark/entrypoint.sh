#!/bin/bash
# The entry point that Spark on Kubernetes calls: `driver ARGUMENT…` or `executor`, with variables.
#
# Any other command is run unchanged.
set -euo pipefail

SPARK_HOME=$(/opt/batchmill/bin/python -c 'import pyspark; print(pyspark.__path__[0])')
export SPARK_HOME

# SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1 and so on, in numeric order.
java_options() {
	local name
	while IFS= read -r name; do
		printf '%s\n' "${!name}"
	done < <(compgen -v | grep '^SPARK_JAVA_OPT_[0-9]*$' | sort -t_ -k4 -n)
}

case "${1:-}" in
driver)
	shift
	set -- "$SPARK_HOME/bin/spark-submit" \
		--conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" --deploy-mode client "$@"
	;;
executor)
	mapfile -t options < <(java_options)
	set -- java "${options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
		-cp "${SPARK_CONF_DIR:-$SPARK_HOME/conf}${SPARK_CLASSPATH:+:$SPARK_CLASSPATH}:$SPARK_HOME/jars/*${SPARK_EXTRA_CLASSPATH:+:$SPARK_EXTRA_CLASSPATH}" \
		org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
		--driver-url "$SPARK_DRIVER_URL" \
		--executor-id "$SPARK_EXECUTOR_ID" \
		--cores "$SPARK_EXECUTOR_CORES" \
		--app-id "$SPARK_APPLICATION_ID" \
		--hostname "$SPARK_EXECUTOR_POD_IP" \
		--resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
		--podName "$SPARK_EXECUTOR_POD_NAME"
	;;
esac
exec tini -s -- "$@"
