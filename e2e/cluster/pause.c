/* The process that holds a pod's namespaces, and reaps what the pod leaves behind. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void stop(int s) { (void)s; _exit(0); }
static void reap(int s) { (void)s; while (waitpid(-1, 0, WNOHANG) > 0); }

int main(void) {
  signal(SIGINT, stop);
  signal(SIGTERM, stop);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
