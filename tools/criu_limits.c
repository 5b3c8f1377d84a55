/*
 * Lets CRIU read the resource limits of a process that belongs to another user without
 * CAP_SYS_RESOURCE, which containers often lack.
 *
 * CRIU asks with prlimit64(), for which the kernel wants that capability even of root when the
 * process is another user's; the same numbers are in /proc/PID/limits for whoever may trace it.
 * So this is loaded before CRIU's C library, and where the kernel refuses, that file answers.
 * Restored processes never see it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINE_BYTES_MAX 256
#define NUMBER_BYTES_MAX 32
/* The name of a limit fills 25 columns, and a space follows. */
#define NAME_COLUMNS 26

typedef long (*syscall_function)(long number, ...);

static rlim_t parse_limit(const char *text)
{
	return *text == 'u' ? RLIM_INFINITY : strtoull(text, NULL, 10);
}

/* After the heading there is one line for each resource, in the order of their numbers. */
static int read_limits(long pid, long resource, struct rlimit *limits)
{
	char path[64], line[LINE_BYTES_MAX];
	char soft[NUMBER_BYTES_MAX], hard[NUMBER_BYTES_MAX];
	FILE *file;
	long number;
	int result = -1;

	snprintf(path, sizeof(path), "/proc/%ld/limits", pid);
	file = fopen(path, "re");
	if (!file)
		return -1;
	for (number = -1; number <= resource && fgets(line, sizeof(line), file); number++)
		;
	if (number == resource + 1 && resource >= 0 &&
	    sscanf(line + NAME_COLUMNS, "%31s %31s", soft, hard) == 2) {
		limits->rlim_cur = parse_limit(soft);
		limits->rlim_max = parse_limit(hard);
		result = 0;
	}
	fclose(file);
	return result;
}

/* CRIU makes this call through the C library's general function. */
long syscall(long number, ...)
{
	static syscall_function next;
	va_list list;
	long a[6], result;
	int i;

	va_start(list, number);
	for (i = 0; i < 6; i++)
		a[i] = va_arg(list, long);
	va_end(list);
	if (!next)
		next = (syscall_function)dlsym(RTLD_NEXT, "syscall");
	result = next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	if (result < 0 && errno == EPERM && number == SYS_prlimit64 && !a[2] && a[3]) {
		if (!read_limits(a[0], a[1], (struct rlimit *)a[3]))
			return 0;
		errno = EPERM;
	}
	return result;
}
