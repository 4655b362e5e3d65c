/* Moves the clock of a process and of all that it starts, while it runs: for LD_PRELOAD.

   The wall clock is as many seconds wrong as the file that SOAK_CLOCK names has in its first eight
   bytes, as a 64-bit number in the machine's order. Monotonic clocks, sleeps and the times of files
   are not changed. libfaketime changes those as well, so that Python cannot sleep any more. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void)
{
	const char *name = getenv("SOAK_CLOCK");
	int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
	void *place;

	real_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	if (file < 0)
		return;
	place = mmap(NULL, sizeof(*offset), PROT_READ, MAP_SHARED, file, 0);
	if (place != MAP_FAILED)
		offset = place;
	close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	int result;

	if (!real_gettime)
		start();
	result = real_gettime(clock, now);
	if (result == 0 && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		now->tv_sec += *offset;
	return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec exact;
	int result = clock_gettime(CLOCK_REALTIME, &exact);

	(void)zone;
	now->tv_sec = exact.tv_sec;
	now->tv_usec = exact.tv_nsec / 1000;
	return result;
}

time_t time(time_t *where)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	if (where)
		*where = now.tv_sec;
	return now.tv_sec;
}
